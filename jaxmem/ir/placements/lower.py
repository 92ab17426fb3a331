"""Operations, and the bodies in them, on a part of their arrays."""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.operands_first import operands_first
from jaxmem.ir.placements import Axis, Placements
from jaxmem.ir.placements.bodies import Body, down
from jaxmem.ir.placements.layers import made_of
from jaxmem.ir.placements.rules import resized
from jaxmem.ir.random_parts import bits_of_part
from jaxmem.ir.scans import is_var, scan_like, split


def on_part(
    eqn,
    args: Sequence[Any],
    placed: Placements,
    length: Callable[[int], int],
    start: Callable[[int], Any],
) -> list[Any]:
    """What an equation gives of parts of its operands.

    Args:
      eqn: an equation with labels (`rules.labels`).
      args: what there is of each operand.
      placed: which of its arrays are cut.
      length: of an axis of this length in the equation, the length of its part.
      start: of the same, where the part starts; it may be traced. Where the part is of
        several places, a number for each of its elements.
    """
    ins, outs = placed.in_axes, placed.out_axes
    name, whole = eqn.primitive.name, lambda axis: eqn.outvars[0].aval.shape[axis]
    first = lambda axis, dtype: _along(
        start(whole(axis)).astype(dtype), axis, eqn.outvars[0].aval.ndim
    )
    if name == "random_bits" and outs[0] is not None and ins[0] is None:
        axis = outs[0]
        how = axis, length(whole(axis)), first(axis, jnp.uint32)
        return [_compat.in_context_of(eqn, partial(bits_of_part, eqn, args[0], *how))]
    new = _compat.bind(eqn, list(args), resized(eqn, placed, length))
    if name == "iota" and outs[0] == eqn.params["dimension"]:
        new = [new[0] + first(outs[0], new[0].dtype)]
    return new


def _along(x, axis: int | None, rank: int):
    """A number as it is; an array of them along an axis of an array of this rank."""
    others = [d for d in range(rank) if d != axis]
    return lax.expand_dims(x, others) if x.ndim else x


def nested(
    eqn, args: Sequence[Any], placed: Placements, run: Callable[..., list[Any]]
) -> list[Any]:
    """A scan, a `cond` or a call on a part.

    Args:
      eqn: the equation.
      args: what there is of each operand.
      placed: how it works on the part; with `inner` bodies.
      run: `run(body, outs, *args)`, a body's outputs, in these forms.
    """
    runs = [partial(run, body, placed.outs) for body in placed.inner]
    if primitives.is_scan(eqn):
        _, n_carry = _compat.scan_counts(eqn)
        inside = [*placed.outs[:n_carry], *down(eqn, placed.outs[n_carry:])]
        consts, init, xs = split(eqn, args)

        def step(carry, x):
            new = run(placed.inner[0], inside, *consts, *carry, *x)
            return new[:n_carry], new[n_carry:]

        carry, ys = scan_like(eqn, step, init, xs)
        return [*carry, *ys]
    if primitives.is_branch(eqn):
        index, *operands = args
        return list(_compat.in_context_of(eqn, lax.switch, index, runs, *operands))
    if primitives.is_remat(eqn):
        return jaxprs.rebind(eqn, args, [jax.make_jaxpr(runs[0])(*args)])
    return _compat.in_context_of(eqn, runs[0], *args)


def of_layers(eqn, args: Sequence[Any], placed: Placements, size: int = 1) -> list[Any]:
    """Outputs of `eqn` on operands cut to `size` layers, where `placed` says."""
    if placed.inner:
        return nested(eqn, args, placed, partial(_body_of_layers, size))
    return _compat.bind(eqn, list(args), resized(eqn, placed, lambda _: size))


def _body_of_layers(size: int, body: Body, outs, *args) -> list[Any]:
    del outs  # what is wanted by layers is made by layers
    position = {id(eqn): i for i, eqn in enumerate(body.jaxpr.eqns)}

    def rule(eqn, values):
        placed = body.placed.get(position[id(eqn)])
        return None if placed is None else of_layers(eqn, values, placed, size)

    return jaxprs.evaluate(body.closed, args, rule)


Place = tuple[Any, Axis]  # a variable and the axis along which it is cut


@dataclass
class Slices:
    """Slices of a graph's variables, made of others as they are asked for.

    Attributes:
      graph: the list of equations.
      whole: gives what is not sliced.
      source: gives a slice of what no cheap operation makes.
      env: the slices so far.
      size: of a slice.
    """

    graph: JaxprGraph
    whole: Callable[[Any], Any]
    source: Callable[[Any, int], Any]
    env: MutableMapping[Place, Any]
    size: int = 1

    def read(self, atom, axis: Axis) -> Any:
        """A slice along `axis`; with None the whole."""
        if not is_var(atom):
            return atom.val
        if axis is None:
            return self.whole(atom)
        for place in operands_first((atom, axis), self._missing):
            if place not in self.env:
                placed = made_of(self.graph, *place)
                if placed is None:
                    self.env[place] = self.source(*place)
                else:
                    self.env.update(self.run(self.graph.maker[place[0]], placed))
        return self.env[atom, axis]

    def run(self, i: int, placed: Placements) -> dict[Place, Any]:
        """What an equation gives of slices, by variable and axis; None for a term."""
        eqn = self.graph.eqns[i]
        args = [self.read(v, axis) for v, axis in placed.operands(eqn)]
        outs = of_layers(eqn, args, placed, self.size)
        places = zip(eqn.outvars, placed.out_axes, strict=True)
        return dict(zip(places, outs, strict=True))

    def _missing(self, place: Place) -> list[Place]:
        """The slices to make before this one."""
        placed = None if place in self.env else made_of(self.graph, *place)
        if placed is None:
            return []
        pairs = placed.operands(self.graph.eqns[self.graph.maker[place[0]]])
        places = [(w, a) for w, a in pairs if is_var(w) and a is not None]
        return [one for one in places if one not in self.env]
