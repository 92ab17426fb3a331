"""Scans, branches and calls: a body works on a part as its equations do.

A body is understood equation by equation, by a rule for one equation, until what goes
into an iteration is what comes out of it, and branches agree.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.placements import REPLICATE, Partial, Placement, Placements, Shard
from jaxmem.ir.placements.propagate import Propagation
from jaxmem.ir.scans import is_var
from jaxmem.ir.types import JaxprEqn, Var

# Of an equation, what a part has of its operands, and how its outputs had best be cut
# (`REPLICATE` where nobody asks): how it works, or None where it is as the whole is. It
# raises `NotInParts`.
Rule = Callable[[Any, Sequence[Placement], Sequence[Placement]], Placements | None]


class NotInParts(Exception):
    """Why an operation cannot be done part by part."""

    def __init__(self, eqn: JaxprEqn, why: str) -> None:
        super().__init__()
        self.eqn, self.why, self.line = eqn, why, line_of(eqn)

    def __str__(self) -> str:
        return f"{named(self.eqn, self.line)}: {self.why}"


def line_of(eqn: JaxprEqn) -> str:
    """Where the user wrote an equation; the line of a library if no other is known."""
    own = _compat.caller_line(eqn, *_compat.INSTALLED)
    return own or _compat.caller_line(eqn)


def named(eqn: JaxprEqn, line: str = "") -> str:
    """An equation by its operation, its source line and its modules."""
    line, scopes = line or line_of(eqn), _compat.name_stack(eqn)
    at, inside = line and f" at {line}", scopes and f" in {scopes}"
    return f"{primitives.quoted(eqn)}{at}{inside}"


def are_whole(placements: Iterable[Placement]) -> bool:
    return all(p == REPLICATE for p in placements)


@dataclass
class Body(Propagation):
    """A list of equations, and how they work on a part.

    Attributes:
      closed: the list, open or closed.
      rule: how one equation works.
      zeros: variables that are zero.
    """

    closed: Any = field(kw_only=True)
    rule: Rule = field(kw_only=True)
    zeros: set[Any] = field(default_factory=set)

    @property
    def jaxpr(self) -> Any:
        return jaxprs.split(self.closed)[0]

    def ins(self) -> list[Placement]:
        return self.all_at(self.jaxpr.invars)

    def outs(self) -> list[Placement]:
        return self.all_at(self.jaxpr.outvars)

    def understand(self, ins: Sequence[Placement]) -> None:
        """Finds `of` and `placed` of the equations in order, once."""
        self.of, self.placed = {}, {}
        for v, placement in zip(self.jaxpr.invars, ins, strict=True):
            asked = self.wanted.get(v, REPLICATE)
            self.put(v, asked if placement == REPLICATE else placement)
        for i, eqn in enumerate(self.jaxpr.eqns):
            if is_zero(eqn, self.zeros):
                self.zeros.update(eqn.outvars)
            found = self.rule(eqn, self.all_at(eqn.invars), self.asked(eqn))
            if found is not None:
                self.place(i, eqn, found)


def is_zero(eqn: JaxprEqn, zeros: set[Any]) -> bool:
    """Whether an equation makes zeros, of a literal or of others in `zeros`."""
    if not primitives.of(eqn).rearranges:
        return False
    v = eqn.invars[0]
    return v in zeros if is_var(v) else jnp.ndim(v.val) == 0 and not v.val


def summed_by(eqns: Sequence[Any], placed: Mapping[int, Placements], v: Var) -> Any:
    """The equation in which parts become the terms of a sum.

    Args:
      eqns: those of a list, in order.
      placed: how those work that do not work on whole arrays, by position.
      v: the sum.

    Returns:
      The equation, of a body where it is in one; None if the parts do not make it.
    """
    maker = {v: i for i in placed for v in eqns[i].outvars}
    eqn = None  # of what is whole: one part counts it
    while is_var(v) and v in maker:
        eqn, found = eqns[maker[v]], placed[maker[v]]
        for body in found.inner:
            out = body.jaxpr.outvars[eqn.outvars.index(v)]
            inner = summed_by(body.jaxpr.eqns, body.placed, out)
            if inner is not None:
                return inner
        pairs = zip(eqn.invars, found.ins, strict=True)
        terms = (w for w, p in pairs if isinstance(p, Partial) and is_var(w))
        made = next((w for w in terms if w in maker), None)
        if made is None:
            break
        v = made
    return eqn


def body_of(
    closed: Any, ins: Sequence[Placement], outs: Sequence[Placement], rule: Rule
) -> Body:
    """How a body works on a part, given what it is given and what is asked of it."""
    body = Body(closed=closed, rule=rule)
    body.want(body.jaxpr.invars, ins)
    body.want(body.jaxpr.outvars, outs)
    known = -1
    while known != len(body.wanted):  # an array may be wanted after it was made
        known = len(body.wanted)
        body.understand(ins)
    return body


def _joined(eqn: JaxprEqn, one: Placement, other: Placement) -> Placement:
    """What a part has of what is one or the other."""
    if REPLICATE not in (one, other) and one != other:
        raise NotInParts(eqn, "parts of one array are along different axes")
    return other if one == REPLICATE else one


def down(eqn: JaxprEqn, stacks: Sequence[Placement]) -> list[Placement]:
    """Of slices of stacks, what a part has of the stacks being known."""
    if Shard(0) in stacks:
        raise NotInParts(eqn, "it goes through the examples one after another")
    return [Shard(p.axis - 1) if isinstance(p, Shard) else p for p in stacks]


def _up(slices: Sequence[Placement]) -> list[Placement]:
    return [Shard(p.axis + 1) if isinstance(p, Shard) else p for p in slices]


def of_scan(
    eqn: JaxprEqn, ins: Sequence[Placement], wanted: Sequence[Placement], rule: Rule
) -> Placements:
    """How a scan works on a part that has all of its iterations."""
    n_consts, n_carry = _compat.scan_counts(eqn)
    end = n_consts + n_carry
    stacks = down(eqn, wanted[n_carry:])
    before = [*ins[:end], *down(eqn, ins[end:])]
    for k, asked in enumerate(wanted[:n_carry]):
        before[n_consts + k] = _joined(eqn, before[n_consts + k], asked)
    while True:
        asked = [*before[n_consts:end], *stacks]
        body = body_of(eqn.params["jaxpr"], before, asked, rule)
        inside, outs = body.ins(), body.outs()
        pairs = zip(inside[n_consts:end], outs[:n_carry], strict=True)
        carry = [_joined(eqn, one, other) for one, other in pairs]
        after = [*inside[:n_consts], *carry, *inside[end:]]
        if after == before:
            break
        before = after
    taken = *before[:end], *_up(before[end:])
    return Placements(tuple(taken), (*carry, *_up(outs[n_carry:])), (body,))


def of_branches(
    eqn: JaxprEqn, ins: Sequence[Placement], wanted: Sequence[Placement], rule: Rule
) -> Placements:
    """How a `cond` works on a part that has all of its predicate."""
    before, outs = list(ins[1:]), list(wanted)
    while True:
        branches = [body_of(b, before, outs, rule) for b in jaxprs.bodies(eqn)]
        after, given = before, outs
        # what one branch needs in parts, the others must take and give in parts
        for branch in branches:
            pairs = zip(after, branch.ins(), strict=True)
            after = [_joined(eqn, a, b) for a, b in pairs]
            pairs = zip(given, branch.outs(), strict=True)
            given = [_joined(eqn, a, b) for a, b in pairs]
        if (after, given) == (before, outs):
            return Placements((REPLICATE, *before), tuple(outs), tuple(branches))
        before, outs = after, given


def of_call(
    body: Any, ins: Sequence[Placement], wanted: Sequence[Placement], rule: Rule
) -> Placements:
    """How a call works on a part; `body`: what is called."""
    found = body_of(body, ins, wanted, rule)
    return Placements(tuple(found.ins()), tuple(found.outs()), (found,))
