"""Scans that stack one value twice."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxmem import _compat
from jaxmem.ir.scans import is_var, size_of
from jaxmem.linting._kept import origin
from jaxmem.linting._subject import (
    LEAST,
    Finding,
    Level,
    Subject,
    array,
    levels,
    place,
)


@dataclass
class _Stacked:
    """One value of a scan: its stacks, and what we know of it.

    Attributes:
      carried: whether it is a carry.
      own: whether an op of this package makes it.
    """

    carried: bool
    own: bool
    stacks: list[Any] = field(default_factory=list)


def carries_twice(subject: Subject) -> Iterator[Finding]:
    """A carry stacked as it enters an iteration and as it leaves, or just twice."""
    for level in levels(subject.live):
        for eqn in level.jaxpr.eqns:
            if eqn.primitive.name == "scan":
                yield from _stacked_twice(level, eqn)


def _stacked_twice(level: Level, eqn) -> Iterator[Finding]:
    for value in _values(level, eqn):
        found = _counted(level, value)
        if len(found) > 1:
            what = "carry" if value.carried else "value"
            more = sorted(map(size_of, found))[:-1]
            yield Finding(
                check="stacked twice",
                severity="warning",
                what=f"a scan stacks one {what} {len(found)} times: "
                f"{array(found[0].aval)}",
                bytes=sum(more),
                remedy=(
                    "jaxmem.schedule keeps one of them; or return no carry as an "
                    "output too, and read it from the stack"
                ),
                **place(level, eqn),
            )


def _values(level: Level, eqn) -> list[_Stacked]:
    """The values that a scan stacks, each with all its stacks."""
    (inner,) = level.inside(eqn)
    n_consts, n_carry = _compat.scan_counts(eqn)
    carries = zip(
        inner.jaxpr.outvars[:n_carry], inner.jaxpr.invars[n_consts:], strict=False
    )
    # what leaves one iteration is what enters the next: one value, under one name
    leaving = [(origin(inner, out), var) for out, var in carries if is_var(out)]
    same = {made.key: (var,) for made, var in leaving}
    own = {(var,) for made, var in leaving if made.is_own}
    found: dict[tuple[Any, ...], _Stacked] = {}
    ys = zip(eqn.outvars[n_carry:], inner.jaxpr.outvars[n_carry:], strict=True)
    for stack, var in ys:
        if is_var(var) and size_of(stack) >= LEAST:
            made = origin(inner, var)
            key = same.get(made.key, made.key)
            new = _Stacked(key in same.values(), key in own or made.is_own)
            found.setdefault(key, new).stacks.append(stack)
    return list(found.values())


def _counted(level: Level, value: _Stacked) -> list[Any]:
    """The stacks to tell of.

    What an op of ours gives, and keeps beside what its reader keeps of it, counts once:
    that is how the op works, and nothing that the user wrote.
    """
    if not value.own:
        return value.stacks
    kept = [v for v in value.stacks if _is_residual(level, v)]
    return kept[:1] + [v for v in value.stacks if v not in kept]


def _is_residual(level: Level, var) -> bool:
    """Whether the backward pass alone reads a value."""
    readers = [e for e in level.jaxpr.eqns if var in filter(is_var, e.invars)]
    backward = all(map(level.is_backward, readers))
    return bool(readers) and backward and var not in level.jaxpr.outvars
