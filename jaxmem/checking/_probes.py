"""The last value of each module of a trace, beside the results, with noise or without.

A module is told by the name scopes of its equations, as `jaxmem._module_path` reads
them. In a scan the values of all iterations are stacked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem._module_path import of_user, parse_op_name
from jaxmem.checking._noise import Noise
from jaxmem.checking._walk import walk


@dataclass
class Probes:
    """A visitor of `walk` that keeps values and adds noise, each where asked to."""

    noise: Noise | None
    keeps: bool = False
    seen: dict[str, Any] = field(default_factory=dict)
    # module -> the user's line, by the order of their last values; shared by all
    # visitors of a trace
    lines: dict[str, str] = field(default_factory=dict)

    def before(self, eqn, args: list) -> list:
        return self.noise.before(eqn, args) if self.noise else args

    def after(self, eqn, stack: str, outs: list) -> list:
        if self.noise:
            outs = self.noise.after(eqn, outs)
        if self.keeps:
            self._keep(eqn, stack, outs)
        return outs

    def of_iteration(self) -> "Probes":
        return Probes(self.noise, self.keeps, lines=self.lines)

    def of_branch(self) -> "Probes":
        return Probes(self.noise, lines=self.lines)

    def of_shard(self) -> "Probes":
        noise = self.noise.inside_shards() if self.noise else None
        return Probes(noise, lines=self.lines)

    def take(self, stacked: dict[str, Any]) -> None:
        self.seen |= stacked

    def _keep(self, eqn, stack: str, outs: list) -> None:
        where = parse_op_name(f"{stack}/{eqn.primitive.name}")
        path = _without_repetition(of_user(where.module_path))
        kept = [x for x in outs if getattr(x, "ndim", 0) and _is_float(x)]
        if not path or where.recomputed or not kept:
            return
        key = f"{path} (backward)" if where.backward else path
        self.seen[key] = kept[-1]
        before = self.lines.pop(key, "")  # the order is that of the last values
        self.lines[key] = _compat.caller_line(eqn, *_compat.INSTALLED) or before


def _is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _without_repetition(path: str) -> str:
    """`M/norm/norm` and `M/norm/M/norm` without the repetition that `grad` makes."""
    parts = path.split("/")
    for size in range(len(parts) // 2, 0, -1):
        if parts[-size:] == parts[-2 * size : -size]:
            return "/".join(parts[:-size])
    return path


def run(closed, args: Sequence[Any], probes: Probes) -> tuple[list[Any], dict]:
    """(results, last values of modules) of a closed jaxpr."""
    outs = walk(closed, args, probes)
    return outs, probes.seen
