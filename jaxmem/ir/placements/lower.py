"""Operations, and the bodies in them, on a part of their arrays."""

from collections.abc import Callable, Collection, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.operands_first import operands_first
from jaxmem.ir.placements import REPLICATE, Partial, Placement, Placements, Shard
from jaxmem.ir.placements.bodies import Body, down
from jaxmem.ir.placements.layers import made_of
from jaxmem.ir.placements.rules import resized
from jaxmem.ir.random_parts import bits_of_part
from jaxmem.ir.scans import is_var, scan_like, split
from jaxmem.ir.shards import constrained
from jaxmem.ir.types import JaxprEqn, Var


def one(length: int) -> int:
    """The length of a slice that is one layer."""
    del length
    return 1


def on_part(
    eqn: JaxprEqn,
    args: Sequence[Any],
    placed: Placements,
    length: Callable[[int], int],
    start: Callable[[int], Any] | None = None,
) -> list[Any]:
    """What an equation gives of parts of its operands.

    Args:
      eqn: an equation with labels (`rules.labels`).
      args: what there is of each operand.
      placed: which of its arrays are cut.
      length: of an axis of this length in the equation, the length of its part.
      start: of the same, where the part starts; it may be traced. Where the part is of
        several places, a number for each of its elements. None where no counter and
        no random bits are cut.
    """
    if not any(isinstance(p, Shard) for p in placed.ins + placed.outs):  # on terms
        return _compat.bind(eqn, list(args))
    ins, outs = placed.in_axes, placed.out_axes
    name, whole = eqn.primitive.name, lambda axis: eqn.outvars[0].aval.shape[axis]

    def first(axis, dtype) -> Any:
        assert start is not None, eqn
        at = start(whole(axis)).astype(dtype)
        return _along(at, axis, eqn.outvars[0].aval.ndim)

    if name == "random_bits" and outs[0] is not None and ins[0] is None:
        axis = outs[0]
        how = axis, length(whole(axis)), first(axis, jnp.uint32)
        return [_compat.in_context_of(eqn, partial(bits_of_part, eqn, args[0], *how))]
    params = resized(eqn, placed, length)
    if name == "scan" and params["length"] == 1 < eqn.params["length"]:
        return _once(eqn, args)
    new = _compat.bind(eqn, list(args), params)
    if name == "iota" and outs[0] == eqn.params["dimension"]:
        new = [new[0] + first(outs[0], new[0].dtype)]
    return new


def _once(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """The single iteration that a part has of a scan, which needs no loop."""
    consts, init, xs = split(eqn, args)
    one = [lax.index_in_dim(x, 0, keepdims=False) for x in xs]
    outs = jaxprs.evaluate(eqn.params["jaxpr"], [*consts, *init, *one])
    return [*outs[: len(init)], *(lax.expand_dims(y, [0]) for y in outs[len(init) :])]


def _along(x: Any, axis: int | None, rank: int) -> Any:
    """A number as it is; an array of them along an axis of an array of this rank."""
    others = [d for d in range(rank) if d != axis]
    return lax.expand_dims(x, others) if x.ndim else x


def nested(
    eqn: JaxprEqn,
    args: Sequence[Any],
    placed: Placements,
    run: Callable[..., list[Any]],
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

        def step(carry, x: Any) -> Any:
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


Form = tuple[Any, Placement]  # a variable, and what a part has of it


@dataclass
class PartValues:
    """What one part has of variables, cut or made as it is asked for.

    Attributes:
      whole: gives what is whole.
      cut: `cut(v, axis, whole)`, a slice of a variable that no part makes.
      length: of an axis of this length, the length of its part.
      start: of the same, where the part starts; for a counter or random bits.
      env: what there is, by variable and form.
      graph: whose cheap operations are done to slices, and not those cut from what they
        give; None for no list.
      is_first: whether the part has what is counted once; it may be traced.
      zeros: variables that are zero, as each term of them is.
      of_shard: whether the part is one of a shard, and others are sharded.
    """

    whole: Callable[[Any], Any]
    cut: Callable[[Any, int, Callable[[Any], Any]], Any]
    length: Callable[[int], int] = one
    start: Callable[[int], Any] | None = None
    env: MutableMapping[Form, Any] = field(default_factory=dict)
    graph: JaxprGraph | None = None
    is_first: Any = True
    zeros: Collection[Any] = ()
    of_shard: bool = False

    def read(self, atom: Any, placement: Placement) -> Any:
        """What the part has of an operand, in the form that is wanted."""
        if not is_var(atom):
            is_term = isinstance(placement, Partial) and atom.val
            return self._term(jnp.asarray(atom.val)) if is_term else atom.val
        if placement == REPLICATE:
            return self.whole(atom)
        for form in operands_first((atom, placement), self._missing):
            if form not in self.env:
                self._make(*form)
        return self.env[atom, placement]

    def operands(self, eqn: JaxprEqn, placed: Placements) -> list[Any]:
        pairs = zip(eqn.invars, placed.ins, strict=True)
        return [self.read(v, placement) for v, placement in pairs]

    def outputs(self, eqn: JaxprEqn, placed: Placements) -> list[Any]:
        """What an equation gives on the part."""
        args = self.operands(eqn, placed)
        if placed.inner:
            return nested(eqn, args, placed, self._body)
        if self.of_shard and primitives.is_constraint(eqn):
            if isinstance(placed.ins[0], Partial):  # each device has its own
                return args
            return [constrained(eqn, args[0], placed.in_axes[0])]
        return on_part(eqn, args, placed, self.length, self.start)

    def run(self, eqn: JaxprEqn, placed: Placements) -> None:
        self.put(eqn, placed, self.outputs(eqn, placed))

    def put(self, eqn: JaxprEqn, placed: Placements, outs: Sequence[Any]) -> None:
        forms = zip(eqn.outvars, placed.outs, strict=True)
        self.env.update(zip(forms, outs, strict=True))

    def _body(self, body: Body, outs: Sequence[Placement], *args: Any) -> list[Any]:
        """A body on the part; `outs`: in which form its outputs are asked for."""
        jaxpr, consts = jaxprs.split(body.closed)
        atoms = zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True)
        env: dict[Form, Any] = {(v, body.at(v)): x for v, x in atoms}
        whole = lambda v: env[v, REPLICATE]
        inside = replace(self, whole=whole, env=env, graph=None, zeros=body.zeros)
        for i, eqn in enumerate(jaxpr.eqns):
            inside.run(eqn, body.placed.get(i) or Placements.of_whole(eqn))
        return [inside.read(v, p) for v, p in zip(jaxpr.outvars, outs, strict=True)]

    def _term(self, x: Any) -> Any:
        """A term of `x`, which counts once: the first part has it."""
        return lax.select(self.is_first, x, jnp.zeros_like(x))

    def _made_of(self, v: Var, placement: Placement) -> Placements | None:
        if self.graph is None or not isinstance(placement, Shard):
            return None
        return made_of(self.graph, v, placement.axis)

    def _maker(self, v: Var) -> Any:
        assert self.graph is not None
        return self.graph.eqns[self.graph.maker[v]]

    def _missing(self, form: Form) -> list[Form]:
        """What is to be made before this."""
        placed = None if form in self.env else self._made_of(*form)
        if placed is None:
            return []
        forms = zip(self._maker(form[0]).invars, placed.ins, strict=True)
        forms = [(v, p) for v, p in forms if is_var(v) and p != REPLICATE]
        return [one for one in forms if one not in self.env]

    def _make(self, v: Var, placement: Placement) -> None:
        placed = self._made_of(v, placement)
        if placed is not None:
            self.run(self._maker(v), placed)
        elif isinstance(placement, Shard):
            self.env[v, placement] = self.cut(v, placement.axis, self.whole)
        else:
            value = self.whole(v)
            self.env[v, placement] = value if v in self.zeros else self._term(value)
