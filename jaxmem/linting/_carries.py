"""Scans that stack one value twice."""

from collections import defaultdict
from collections.abc import Iterator

from jaxmem import _compat
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
from jaxmem.scheduling._scans import is_var, size_of


def carries_twice(subject: Subject) -> Iterator[Finding]:
    """A carry stacked as it comes into a turn and as it goes out, or just twice."""
    for level in levels(subject.live):
        for eqn in level.jaxpr.eqns:
            if eqn.primitive.name == "scan":
                yield from _stacked_twice(level, eqn)


def _stacked_twice(level: Level, eqn) -> Iterator[Finding]:
    (inner,) = level.inside(eqn)
    n_consts, n_carry = _compat.scan_counts(eqn)
    # what leaves one turn is what comes into the next: one value, under one name
    same = {
        origin(inner, out).key: (carried,)
        for out, carried in zip(
            inner.jaxpr.outvars[:n_carry], inner.jaxpr.invars[n_consts:], strict=False
        )
        if is_var(out)
    }
    stacks = defaultdict(list)
    ys = zip(eqn.outvars[n_carry:], inner.jaxpr.outvars[n_carry:], strict=True)
    for stack, var in ys:
        if is_var(var) and size_of(stack) >= LEAST:
            value = origin(inner, var).key
            stacks[same.get(value, value)].append(stack)
    carried = set(same.values())
    for value, found in stacks.items():
        if len(found) > 1:
            what = "carry" if value in carried else "value"
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
