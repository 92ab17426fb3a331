"""The values of one part of the examples, and equations that are done on it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.placements import REPLICATE, Partial, Placement, Placements, Shard
from jaxmem.ir.placements.bodies import Body
from jaxmem.ir.placements.lower import nested, on_part
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import constrained


@dataclass
class PartValues:
    """The values of one part.

    Attributes:
      n: how many parts there are.
      part: which one it is, a scalar that may be traced.
      of: what the part has of each variable that is not whole.
      zeros: variables that are zero.
      env: the values that are known.
      slices: of whole arrays that are cut here, the part's.
    """

    n: int
    part: Any
    of: dict[Any, Placement]
    zeros: set[Any]
    env: dict[Any, Any] = field(default_factory=dict)
    slices: dict[Any, Any] = field(default_factory=dict)

    def whole(self, v) -> Any:
        return self.env[v]

    def read(self, atom, wanted: Placement) -> Any:
        """What the part has of an operand, in the form that is wanted."""
        if not is_var(atom):
            zero = not isinstance(wanted, Partial) or not atom.val
            return atom.val if zero else self._first(jnp.asarray(atom.val))
        have = self.of.get(atom, REPLICATE)
        if have == wanted and (have == REPLICATE or atom in self.env):
            return self.whole(atom) if have == REPLICATE else self.env[atom]
        assert have in (REPLICATE, wanted), (atom, have, wanted)
        if isinstance(wanted, Partial):
            value = self.whole(atom)
            return value if atom in self.zeros else self._first(value)
        assert isinstance(wanted, Shard), (atom, have, wanted)
        if atom not in self.slices:
            self.slices[atom] = self.slice(self.whole(atom), wanted.axis)
        return self.slices[atom]

    def slice(self, x, axis: int) -> Any:
        size = x.shape[axis] // self.n
        return lax.dynamic_slice_in_dim(x, self.part * size, size, axis)

    def _first(self, x) -> Any:
        """A term of `x`, which counts once: the first part has it."""
        return lax.select(self.part == 0, x, jnp.zeros_like(x))

    def apply(self, eqn, found: Placements | None) -> None:
        """An equation on the part."""
        ins = found.ins if found else [REPLICATE] * len(eqn.invars)
        args = [self.read(v, p) for v, p in zip(eqn.invars, ins, strict=True)]
        outs = _compat.bind(eqn, args) if found is None else self._on(eqn, found, args)
        self.env.update(zip(eqn.outvars, outs, strict=True))

    def _on(self, eqn, found: Placements, args: list) -> list[Any]:
        if found.inner:
            return nested(eqn, args, found, self._run)
        if not any(isinstance(p, Shard) for p in found.ins + found.outs):  # on terms
            return _compat.bind(eqn, args)
        if primitives.is_constraint(eqn):
            return [constrained(eqn, args[0], found.in_axes[0])]
        length = lambda size: size // self.n
        start = lambda size: self.part * length(size)
        return on_part(eqn, args, found, length, start)

    def _run(self, body: Body, outs: Sequence[Placement], *args) -> list[Any]:
        """A body on the part; `outs`: in which form its outputs are asked for."""
        jaxpr, consts = jaxprs.split(body.closed)
        values = PartValues(self.n, self.part, body.of, body.zeros)
        names = [*jaxpr.constvars, *jaxpr.invars]
        values.env.update(zip(names, [*consts, *args], strict=True))
        for i, eqn in enumerate(jaxpr.eqns):
            values.apply(eqn, body.placed.get(i))
        return [values.read(v, p) for v, p in zip(jaxpr.outvars, outs, strict=True)]
