"""Operations, and the bodies in them, on a part of their arrays."""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
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


def one(length: int) -> int:
    """The length of a slice that is one layer."""
    del length
    return 1


def on_part(
    eqn,
    args: Sequence[Any],
    placed: Placements,
    length: Callable[[int], int],
    start: Callable[[int], Any] | None = None,
) -> list[Any]:
    """What an equation gives of parts of its operands.

    Args:
      eqn: an equation with labels (`rules.labels`), or with bodies of such.
      args: what there is of each operand.
      placed: which of its arrays are cut.
      length: of an axis of this length in the equation, the length of its part.
      start: of the same, where the part starts; it may be traced. Where the part is of
        several places, a number for each of its elements. None where no counter and
        no random bits are cut.
    """
    if placed.inner:
        return nested(eqn, args, placed, partial(_body_on_part, length, start))
    ins, outs = placed.in_axes, placed.out_axes
    name, whole = eqn.primitive.name, lambda axis: eqn.outvars[0].aval.shape[axis]

    def first(axis, dtype):
        assert start is not None, eqn
        at = start(whole(axis)).astype(dtype)
        return _along(at, axis, eqn.outvars[0].aval.ndim)

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


def _body_on_part(length, start, body: Body, outs, *args) -> list[Any]:
    del outs  # what is wanted of it in parts is made in parts
    position = {id(eqn): i for i, eqn in enumerate(body.jaxpr.eqns)}

    def rule(eqn, values):
        placed = body.placed.get(position[id(eqn)])
        return None if placed is None else on_part(eqn, values, placed, length, start)

    return jaxprs.evaluate(body.closed, args, rule)


Place = tuple[Any, Axis]  # a variable and the axis along which it is cut


@dataclass
class Slices:
    """Slices of a graph's variables, cut or made of others as they are asked for.

    Attributes:
      graph: the list of equations.
      whole: gives what is not sliced.
      cut: gives a slice of a variable along an axis.
      env: the slices so far.
      length: of an axis of this length, the length of its slices.
      start: of the same, where the slice starts; for a counter or random bits.
      remade: whether cheap operations are done to slices, and not those cut from what
        they give.
    """

    graph: JaxprGraph
    whole: Callable[[Any], Any]
    cut: Callable[[Any, int], Any]
    env: MutableMapping[Place, Any] = field(default_factory=dict)
    length: Callable[[int], int] = one
    start: Callable[[int], Any] | None = None
    remade: bool = True

    def read(self, atom, axis: Axis) -> Any:
        """A slice along `axis`; with None the whole."""
        if not is_var(atom):
            return atom.val
        if axis is None:
            return self.whole(atom)
        for place in operands_first((atom, axis), self._missing):
            if place not in self.env:
                placed = self._made_of(place)
                if placed is None:
                    self.env[place] = self.cut(*place)
                else:
                    self.run(self.graph.maker[place[0]], placed)
        return self.env[atom, axis]

    def operands(self, i: int, placed: Placements) -> list[Any]:
        return [self.read(v, axis) for v, axis in placed.operands(self.graph.eqns[i])]

    def run(self, i: int, placed: Placements) -> None:
        """An equation on slices; an output of which it gives a term has no axis."""
        eqn, args = self.graph.eqns[i], self.operands(i, placed)
        self.put(i, placed, on_part(eqn, args, placed, self.length, self.start))

    def put(self, i: int, placed: Placements, outs: Sequence[Any]) -> None:
        places = zip(self.graph.eqns[i].outvars, placed.out_axes, strict=True)
        self.env.update(zip(places, outs, strict=True))

    def _made_of(self, place: Place) -> Placements | None:
        return made_of(self.graph, *place) if self.remade else None

    def _missing(self, place: Place) -> list[Place]:
        """The slices to make before this one."""
        placed = None if place in self.env else self._made_of(place)
        if placed is None:
            return []
        pairs = placed.operands(self.graph.eqns[self.graph.maker[place[0]]])
        places = [(w, a) for w, a in pairs if is_var(w) and a is not None]
        return [w for w in places if w not in self.env]
