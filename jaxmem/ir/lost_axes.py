"""Activations that XLA does not sharded over devices as the examples are.

Weights that are sharded over the axis of the mesh that the examples are sharded over
(FSDP) leave XLA a choice: to gather the weights, or to move the activations to the axis
that the weights are cut along. Unless a constraint says otherwise it may do the latter,
and the devices send each other activations, in every layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.auto_axes import explicit_types
from jaxmem.ir.flatten import flatten
from jaxmem.ir.jaxprs import is_var
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.scans import LARGE, size_of
from jaxmem.ir.shard_labels import labelled_shardings
from jaxmem.ir.shards import Spec, of_shardings, whole
from jaxmem.ir.types import Body, JaxprEqn


@dataclass(frozen=True)
class LostAxis:
    """An activation that is sharded otherwise than what it is made of.

    Attributes:
      eqn: what makes it; a scan for what layers hand on.
      var: the activation.
      asked: how it is sharded by what is named for arguments and in constraints.
      found: how XLA shards it.
    """

    eqn: Any
    var: Any
    asked: Spec
    found: Spec

    @property
    def constraint(self) -> str:
        """The line to write."""
        entries = (names[0] if len(names) == 1 else names for names in self.asked)
        spec = ", ".join(repr(entry or None) for entry in entries)
        place = f"jax.NamedSharding(mesh, jax.P({spec}))"
        return f"x = jax.lax.with_sharding_constraint(x, {place})"

    def __str__(self) -> str:
        axes = [(k, n) for k, names in enumerate(self.asked) for n in names]
        gone = [(k, n) for k, n in axes if n not in self.found[k]]
        (axis, name), *_ = gone
        now = next((k for k, names in enumerate(self.found) if name in names), None)
        instead = "each device has all" if now is None else f"XLA shards axis {now}"
        return (
            f"axis {axis} of {self.var.aval.str_short()} is not sharded over {name!r} "
            f"as the examples are: {instead}"
        )


def lost_axes(closed: Body, shardings: Sequence[Any]) -> Iterator[LostAxis]:
    """What layers hand on, or else products, of a step under these shardings."""
    # over explicit axes all are sharded as their types say
    if not any(shardings) or explicit_types(closed) is not None:
        return
    flat = flatten(closed)
    given = of_shardings(flat, shardings)
    if given is None:
        return
    asked, found = labelled_shardings(flat, given), shardings_in(flat, given)
    if found.mesh is None:
        return
    eqns = jaxprs.split(flat)[0].eqns
    layers = [(e, v) for e in eqns if primitives.is_scan(e) for v in _carries(e)]
    products = [(e, e.outvars[0]) for e in eqns if primitives.is_dot(e)]
    for made in (layers, products):
        wanted = ((e, v, asked.of.get(v)) for e, v in made if size_of(v) >= LARGE)
        lost = [
            LostAxis(eqn, v, spec, found.of.get(v, whole(v)))
            for eqn, v, spec in wanted
            if spec and _is_lost(spec, found.of.get(v, whole(v)))
        ]
        yield from lost
        if lost:
            return


def _carries(eqn: JaxprEqn) -> list[Any]:
    count = _compat.scan_counts(eqn)[1]
    return [v for v in eqn.outvars[:count] if is_var(v) and v.aval.ndim > 1]


def _is_lost(asked: Spec, found: Spec) -> bool:
    return any({*a} - {*b} for a, b in zip(asked, found, strict=True))
