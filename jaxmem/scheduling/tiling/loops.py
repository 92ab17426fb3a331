"""Scans, branches and calls on one part of the examples.

A body is understood equation by equation, until what goes into an iteration is what
comes out of it: then a scan works on a part as its body does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.flatten import why_closed
from jaxmem.ir.scans import is_var
from jaxmem.scheduling.tiling import one_by_one
from jaxmem.scheduling.tiling.partial_sums import (
    GOES_ON,
    SUM,
    NotInParts,
    PartTreatment,
    State,
    line_of,
    treated,
)
from jaxmem.scheduling.tiling.prepared import called
from jaxmem.scheduling.tiling.shard_parts import Parts


def is_nested(eqn) -> bool:
    """Whether an equation is one whose bodies are understood here."""
    nested = primitives.is_scan(eqn) or primitives.is_branch(eqn)
    return nested or primitives.of(eqn).calls


def treatment(
    eqn, ins: Sequence[State], wanted: Sequence[int | None], parts: Parts
) -> PartTreatment | None:
    """`partial_sums.treated`, of scans, branches and calls too."""
    is_whole = all(s is None for s in ins)
    if is_whole and all(w is None for w in wanted):
        return None
    if not is_nested(eqn):
        return treated(eqn, ins, wanted, parts)
    try:
        if _compat.has_side_effects(eqn):
            raise NotInParts(eqn, "it has side effects")
        if primitives.is_scan(eqn):
            return _scan(eqn, ins, wanted, parts)
        if primitives.is_branch(eqn):
            return _cond(eqn, ins, wanted, parts)
        return _call(eqn, ins, wanted, parts)
    except NotInParts as reason:
        if is_whole:
            return None
        # what JAX has traced once for all its callers has no line of its own
        reason.line = reason.line or line_of(eqn)
        raise


@dataclass
class Body:
    """A body, and how its equations work on a part.

    Attributes:
      closed: the body, open or closed.
      parts: how the examples are cut.
      wanted: of variables that some equation takes cut: along which axis.
      state: what a part has of each variable that is not whole.
      treated: the equations that do not work on whole arrays alone, by position.
      zeros: variables that are zero.
    """

    closed: Any
    parts: Parts
    wanted: dict[Any, int] = field(default_factory=dict)
    state: dict[Any, State] = field(default_factory=dict)
    treated: dict[int, PartTreatment] = field(default_factory=dict)
    zeros: set[Any] = field(default_factory=set)

    @property
    def jaxpr(self) -> Any:
        return jaxprs.split(self.closed)[0]

    def of(self, atom) -> State:
        return self.state.get(atom) if is_var(atom) else None

    def ins(self) -> list[State]:
        return [self.of(v) for v in self.jaxpr.invars]

    def outs(self) -> list[State]:
        return [self.of(v) for v in self.jaxpr.outvars]

    def want(self, atoms: Sequence[Any], states: Sequence[State]) -> None:
        """Notes which variables some equation, or the caller, takes cut."""
        for v, state in zip(atoms, states, strict=True):
            if isinstance(state, int) and is_var(v):
                self.wanted.setdefault(v, state)

    def understand(self, ins: Sequence[State]) -> None:
        """Finds `state` and `treated` of the equations in order, once."""
        self.state, self.treated = {}, {}
        for v, state in zip(self.jaxpr.invars, ins, strict=True):
            self._put(v, self.wanted.get(v) if state is None else state)
        for i, eqn in enumerate(self.jaxpr.eqns):
            if is_zero(eqn, self.zeros):
                self.zeros.update(eqn.outvars)
            wanted = [self.wanted.get(v) for v in eqn.outvars]
            found = treatment(eqn, list(map(self.of, eqn.invars)), wanted, self.parts)
            if found is None:
                continue
            if any(s not in (None, SUM) for s in found.outs if not isinstance(s, int)):
                raise NotInParts(eqn, GOES_ON)
            self.treated[i] = found
            self.want(eqn.invars, found.ins)
            for v, state in zip(eqn.outvars, found.outs, strict=True):
                self._put(v, state)

    def _put(self, v, state: State) -> None:
        if state is not None:
            self.state[v] = state


def is_zero(eqn, zeros: set[Any]) -> bool:
    """Whether an equation makes zeros, of a literal or of others in `zeros`."""
    if not primitives.of(eqn).rearranges:
        return False
    v = eqn.invars[0]
    return v in zeros if is_var(v) else jnp.ndim(v.val) == 0 and not v.val


def summed_by(eqns: Sequence[Any], treated: Mapping[int, PartTreatment], v) -> Any:
    """The equation in which parts of the examples become the terms of a sum.

    Args:
      eqns: those of a list, in order.
      treated: how those work that do not work on whole arrays, by position.
      v: the sum.

    Returns:
      The equation, of a body where it is in one; None if the parts do not make it.
    """
    maker = {v: i for i in treated for v in eqns[i].outvars}
    eqn = None  # of what is whole: one part counts it
    while is_var(v) and v in maker:
        eqn, found = eqns[maker[v]], treated[maker[v]]
        for body in found.inner:
            out = body.jaxpr.outvars[eqn.outvars.index(v)]
            inner = summed_by(body.jaxpr.eqns, body.treated, out)
            if inner is not None:
                return inner
        pairs = zip(eqn.invars, found.ins, strict=True)
        terms = (w for w, state in pairs if isinstance(state, str) and is_var(w))
        v = next((w for w in terms if w in maker), None)
        if v is None:
            break
    return eqn


def body_of(
    closed, ins: Sequence[State], outs: Sequence[State], parts: Parts, zeros=()
) -> Body:
    """How a body works on a part, given what it is given and what is asked of it."""
    body = Body(closed, parts)
    jaxpr = body.jaxpr
    body.zeros.update(v for v, z in zip(jaxpr.invars, zeros, strict=False) if z)
    body.want(jaxpr.invars, ins)
    body.want(jaxpr.outvars, outs)
    known = -1
    while known != len(body.wanted):  # an array may be wanted after it was made
        known = len(body.wanted)
        body.understand(ins)
    return body


def _joined(eqn, one: State, other: State) -> State:
    """What a part has of what is one or the other."""
    if one is not None and other is not None and one != other:
        raise NotInParts(eqn, "examples along two axes of one array")
    return other if one is None else one


def down(eqn, states: Sequence[State]) -> list[State]:
    """Of slices of stacks, what a part has of the stacks being known."""
    if any(s == 0 for s in states if isinstance(s, int)):
        raise NotInParts(eqn, "it goes through the examples one after another")
    return [s - 1 if isinstance(s, int) else s for s in states]


def _up(states: Sequence[State]) -> list[State]:
    return [s + 1 if isinstance(s, int) else s for s in states]


def _scan(eqn, ins, wanted, parts: Parts) -> PartTreatment:
    if one_by_one.is_one_by_one(eqn, ins, wanted):
        return one_by_one.treatment(eqn, ins, parts.blocks)
    n_consts, n_carry = _compat.scan_counts(eqn)
    end = n_consts + n_carry
    stacks = down(eqn, wanted[n_carry:])
    before = [*ins[:end], *down(eqn, ins[end:])]
    for k, axis in enumerate(wanted[:n_carry]):
        before[n_consts + k] = _joined(eqn, before[n_consts + k], axis)
    while True:
        asked = [*before[n_consts:end], *stacks]
        body = body_of(eqn.params["jaxpr"], before, asked, parts)
        inside, outs = body.ins(), body.outs()
        pairs = zip(inside[n_consts:end], outs[:n_carry], strict=True)
        carry = [_joined(eqn, one, other) for one, other in pairs]
        after = [*inside[:n_consts], *carry, *inside[end:]]
        if after == before:
            break
        before = after
    taken = *before[:end], *_up(before[end:])
    return PartTreatment(tuple(taken), (*carry, *_up(outs[n_carry:])), (body,))


def _cond(eqn, ins, wanted, parts: Parts) -> PartTreatment:
    if ins[0] is not None:
        raise NotInParts(eqn, "which branch it takes depends on the examples")
    before, outs = list(ins[1:]), list(wanted)
    while True:
        branches = [body_of(b, before, outs, parts) for b in jaxprs.bodies(eqn)]
        after, given = before, outs
        for branch in branches:
            pairs = zip(after, branch.ins(), strict=True)
            after = [_joined(eqn, a, b) for a, b in pairs]
            pairs = zip(given, branch.outs(), strict=True)
            given = [_joined(eqn, a, b) for a, b in pairs]
        if (after, given) == (before, outs):
            return PartTreatment((None, *before), tuple(outs), tuple(branches))
        before, outs = after, given


def _call(eqn, ins, wanted, parts: Parts) -> PartTreatment:
    if primitives.is_jit(eqn) and (why := why_closed(eqn)):
        raise NotInParts(eqn, why)
    body = body_of(called(eqn), ins, wanted, parts)
    return PartTreatment(tuple(body.ins()), tuple(body.outs()), (body,))
