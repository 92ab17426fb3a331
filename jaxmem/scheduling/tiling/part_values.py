"""The values of one part of the examples, and equations that are done on it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.parts import on_part
from jaxmem.ir.scans import is_var, scan_like, split
from jaxmem.ir.shards import constrained
from jaxmem.scheduling.tiling.loops import Body, down
from jaxmem.scheduling.tiling.partial_sums import PartTreatment, State


@dataclass
class PartValues:
    """The values of one part.

    Attributes:
      n: how many parts there are.
      part: which one it is, a scalar that may be traced.
      state: what the part has of each variable that is not whole.
      zeros: variables that are zero.
      env: the values that are known.
      slices: of whole arrays that are cut here, the part's.
    """

    n: int
    part: Any
    state: dict[Any, State]
    zeros: set[Any]
    env: dict[Any, Any] = field(default_factory=dict)
    slices: dict[Any, Any] = field(default_factory=dict)

    def whole(self, v) -> Any:
        return self.env[v]

    def read(self, atom, wanted: State) -> Any:
        """What the part has of an operand, in the form that is wanted."""
        if not is_var(atom):
            zero = not isinstance(wanted, str) or not atom.val
            return atom.val if zero else self._first(jnp.asarray(atom.val))
        have = self.state.get(atom)
        if have == wanted and (have is None or atom in self.env):
            return self.whole(atom) if have is None else self.env[atom]
        assert wanted is not None and have in (None, wanted), (atom, have, wanted)
        if isinstance(wanted, str):
            value = self.whole(atom)
            return value if atom in self.zeros else self._first(value)
        if atom not in self.slices:
            self.slices[atom] = self.slice(self.whole(atom), wanted)
        return self.slices[atom]

    def slice(self, x, axis: int) -> Any:
        size = x.shape[axis] // self.n
        return lax.dynamic_slice_in_dim(x, self.part * size, size, axis)

    def _first(self, x) -> Any:
        """A term of `x`, which counts once: the first part has it."""
        return lax.select(self.part == 0, x, jnp.zeros_like(x))

    def apply(self, eqn, found: PartTreatment | None) -> None:
        """An equation on the part."""
        states = found.ins if found else [None] * len(eqn.invars)
        pairs = zip(eqn.invars, states, strict=True)
        args = [self.read(v, state) for v, state in pairs]
        outs = _compat.bind(eqn, args) if found is None else self._on(eqn, found, args)
        self.env.update(zip(eqn.outvars, outs, strict=True))

    def _on(self, eqn, found: PartTreatment, args: list) -> list[Any]:
        if found.inner:
            return self._nested(eqn, found, args)
        axes = lambda states: [s if isinstance(s, int) else None for s in states]
        ins, outs = axes(found.ins), axes(found.outs)
        if all(axis is None for axis in [*ins, *outs]):  # on terms
            return _compat.bind(eqn, args)
        if primitives.is_constraint(eqn):
            return [constrained(eqn, args[0], ins[0])]
        length = lambda size: size // self.n
        start = lambda size: self.part * length(size)
        return on_part(eqn, args, ins, outs, length, start)

    def _nested(self, eqn, found: PartTreatment, args: list) -> list[Any]:
        outs = list(found.outs)
        runs = [partial(_run, body, self.part, outs) for body in found.inner]
        if primitives.is_scan(eqn):
            n_consts, n_carry = _compat.scan_counts(eqn)
            inside = [*outs[:n_carry], *down(eqn, outs[n_carry:])]
            consts, init, xs = split(eqn, args)

            def step(carry, x):
                values = [*consts, *carry, *x]
                new = _run(found.inner[0], self.part, inside, *values)
                return new[:n_carry], new[n_carry:]

            carry, ys = scan_like(eqn, step, init, xs)
            return [*carry, *ys]
        if primitives.is_branch(eqn):
            index, *operands = args
            new = _compat.in_context_of(eqn, lax.switch, index, runs, *operands)
            return list(new)
        if primitives.is_remat(eqn):
            return jaxprs.rebind(eqn, args, [jax.make_jaxpr(runs[0])(*args)])
        return _compat.in_context_of(eqn, runs[0], *args)


def _run(body: Body, part, outs: Sequence[State], *args) -> list[Any]:
    """A body on a part; `outs`: in which form its outputs are asked for."""
    jaxpr, consts = jaxprs.split(body.closed)
    values = PartValues(body.parts.blocks, part, body.state, body.zeros)
    names = [*jaxpr.constvars, *jaxpr.invars]
    values.env.update(zip(names, [*consts, *args], strict=True))
    for i, eqn in enumerate(jaxpr.eqns):
        values.apply(eqn, body.treated.get(i))
    return [values.read(v, s) for v, s in zip(jaxpr.outvars, outs, strict=True)]
