"""Values inside the modules of a trace, beside its results, with noise or without.

A module is told by the name scopes of its equations. Of each module the products,
nonlinear functions and sums are kept, a few of each primitive: a rewrite may move them,
repeat them or leave them out, and does not rename them. In a scan the values of all
iterations are stacked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem._module_path import ops_in, parse_op_name, without_repetition
from jaxmem.checking._noise import Noise
from jaxmem.checking._walk import walk
from jaxmem.ir import primitives

_OF_A_KIND = 4
# what a rewrite may write in another way
_WRITTEN_OTHERWISE = ("mul", "sub", "div", "convert_element_type", "integer_pow")


@dataclass(frozen=True)
class Place:
    """Where a value is computed.

    Attributes:
      module: the path of the module.
      kind: all by which it is known in another trace: module, direction, primitive.
      line: of the user's.
      loop: the number of the outermost scan that it is in; None for none.
      reverse: whether that scan runs backwards.
    """

    module: str
    kind: tuple[str, bool, str]
    line: str
    loop: int | None = None
    reverse: bool = False


@dataclass
class Probes:
    """A visitor of `walk` that keeps values and adds noise, each where asked to."""

    noise: Noise | None
    keeps: bool = False
    seen: dict[str, Any] = field(default_factory=dict)
    # of the values that are seen, in order; shared by all visitors of a trace
    places: dict[str, "Place"] = field(default_factory=dict)
    numbers: dict[tuple[int, str], str] = field(default_factory=dict)
    loop: tuple[int, bool] | None = None  # number of the outermost scan, and reverse

    def before(self, eqn, args: list) -> list:
        return self.noise.before(eqn, args) if self.noise else args

    def after(self, eqn, stack: str, outs: list) -> list:
        if self.noise:
            outs = self.noise.after(eqn, outs)
        if self.keeps:
            self._keep(eqn, stack, outs)
        return outs

    def of_iteration(self, eqn) -> "Probes":
        loop = self.loop or (len(self.places), bool(eqn.params["reverse"]))
        return replace(self, seen={}, loop=loop)

    def of_branch(self) -> "Probes":
        return replace(self, seen={}, keeps=False)

    def of_shard(self) -> "Probes":
        noise = self.noise.inside_shards() if self.noise else None
        return replace(self, seen={}, keeps=False, noise=noise)

    def take(self, stacked: dict[str, Any]) -> None:
        self.seen |= stacked

    def _keep(self, eqn, stack: str, outs: list) -> None:
        name = eqn.primitive.name
        where = parse_op_name(f"{stack}/{name}")
        # what rounds nothing is not worth a place in memory
        skipped = primitives.of(eqn).exact or name in _WRITTEN_OTHERWISE
        if skipped or where.recomputed or ops_in(where.module_path):
            return
        module = without_repetition(where.module_path)
        kind = module, where.backward, name
        kept = [x for x in outs if getattr(x, "ndim", 0) and _is_float(x)]
        if not module or not kept:
            return
        mark = id(eqn), stack  # a scan may trace its body twice
        if mark not in self.numbers:
            if sum(place.kind == kind for place in self.places.values()) >= _OF_A_KIND:
                return
            self.numbers[mark] = key = str(len(self.places))
            line = _compat.caller_line(eqn, *_compat.INSTALLED)
            loop, reverse = self.loop or (None, False)
            self.places[key] = Place(module, kind, line, loop, reverse)
        self.seen[self.numbers[mark]] = kept[0]


def _is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def run(closed, args: Sequence[Any], probes: Probes) -> tuple[list[Any], dict]:
    """(results, values of modules by their numbers) of a closed jaxpr."""
    outs = walk(closed, args, probes)
    return outs, probes.seen
