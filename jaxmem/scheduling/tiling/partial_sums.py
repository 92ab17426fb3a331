"""How one operation works on one part of the examples.

What a part has of an array is its slice of it, a term of it (the array is the sum of
all parts' terms), or the whole array, where it is the same for every part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.axis_labels import cut
from jaxmem.ir.primitives import Kind
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import held_labels
from jaxmem.scheduling.tiling.shard_parts import Parts

# of an array: None if it is whole, the axis along which it is cut, or the operation of
# `lax` that combines what the parts have
State = int | str | None
SUM = "add"

# why an operation cannot be done part by part, where examples depend on each other
MEETS = "an array of some examples meets a sum over all of them"
NEEDS_ALL = "it needs what all examples give"
NEEDS_SUM = "it needs the sum over all examples"
GOES_ON = "it needs all examples before the body goes on"


class NotInParts(Exception):
    """Why an operation cannot be done part by part."""

    def __init__(self, eqn, why: str):
        super().__init__()
        self.eqn, self.why, self.line = eqn, why, line_of(eqn)

    def __str__(self) -> str:
        return f"{named(self.eqn, self.line)}: {self.why}"


def line_of(eqn) -> str:
    """Where the user wrote an equation; the line of a library if no other is known."""
    own = _compat.caller_line(eqn, *_compat.INSTALLED)
    return own or _compat.caller_line(eqn)


def named(eqn, line: str = "") -> str:
    """An equation by its operation, its source line and its modules."""
    line, scopes = line or line_of(eqn), _compat.name_stack(eqn)
    at, inside = line and f" at {line}", scopes and f" in {scopes}"
    return f"{primitives.quoted(eqn)}{at}{inside}"


@dataclass(frozen=True)
class PartTreatment:
    """How an equation works on a part.

    Attributes:
      ins: what it takes of each operand.
      outs: what it gives of each output.
      inner: how its bodies work on the part (`loops.Body`), if it has any.
    """

    ins: tuple[State, ...]
    outs: tuple[State, ...]
    inner: tuple[Any, ...] = ()


_JOINED = ("neg", "add_any", "concatenate", "stack", "unstack")


def moves_sums(eqn) -> bool:
    """Whether it changes where a sum lies, or adds sums.

    An optimizer's arithmetic does neither.
    """
    known = primitives.of(eqn)
    return known.rearranges or known.name in _JOINED


def treated(
    eqn, ins: Sequence[State], wanted: Sequence[int | None], parts: Parts
) -> PartTreatment | None:
    """How an equation without bodies works on one of `n` parts.

    Args:
      eqn: the equation.
      ins: what a part has of each operand.
      wanted: along which axis outputs had best be cut; None where nobody asks.
      parts: how the examples are cut.

    Returns:
      The treatment; None where all operands are whole and nothing can be cut.

    Raises:
      NotInParts: it needs all examples.
    """
    if any(isinstance(s, str) for s in ins):
        return _on_terms(eqn, ins)
    if primitives.is_barrier(eqn):
        pairs = zip(ins, wanted, strict=True)
        kept = tuple(w if s is None else s for s, w in pairs)
        return PartTreatment(kept, kept)
    if primitives.of(eqn).kind is Kind.PSUM:  # n parts would send n times as many
        if all(s is None for s in ins):
            return None
        raise NotInParts(eqn, "it sums over devices")
    asks = [*wanted] if all(s is None for s in ins) else [None] * len(eqn.outvars)
    known = [s if isinstance(s, int) else None for s in ins]
    is_held = primitives.is_constraint(eqn)
    table = held_labels(eqn, parts.shards) if is_held else None
    found = cut(eqn, known, asks, parts.blocks, table)
    if isinstance(found, str):
        if all(s is None for s in ins):
            return None
        raise NotInParts(eqn, found)
    if not found.combine:
        return PartTreatment(found.ins, found.outs)
    places: tuple[State, ...] = found.ins
    if primitives.of(eqn).kind is Kind.SCATTER:
        if found.combine != SUM:
            raise NotInParts(eqn, "what its parts write cannot be combined")
        places = (SUM, *places[1:])  # what it adds to counts once
    return PartTreatment(places, (found.combine,) * len(eqn.outvars))


def _on_terms(eqn, ins: Sequence[State]) -> PartTreatment:
    """An equation that is linear in operands of which a part has a term."""
    known, count = primitives.of(eqn), len(eqn.invars)
    terms = [k for k, s in enumerate(ins) if s == SUM]
    if any(isinstance(s, int) for s in ins):
        raise NotInParts(eqn, MEETS)
    if any(s not in (None, SUM) for s in ins):
        raise NotInParts(eqn, NEEDS_ALL)
    if primitives.is_barrier(eqn):
        return PartTreatment(tuple(ins), tuple(ins))
    linear = [*range(count)[known.linear]] if known.linear else []
    asked = terms if known.bilinear else linear
    is_linear = len(terms) == 1 if known.bilinear else set(terms) <= set(linear)
    floats = (jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
    if known.name == "pad":
        is_linear &= not is_var(eqn.invars[1]) and eqn.invars[1].val == 0
    if not is_linear or not all(floats):
        raise NotInParts(eqn, NEEDS_SUM)
    return PartTreatment(
        tuple(SUM if k in asked else None for k in range(count)),
        (SUM,) * len(eqn.outvars),
    )
