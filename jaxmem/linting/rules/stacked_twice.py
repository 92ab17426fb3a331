"""Scans that stack one value several times."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxmem import _compat
from jaxmem.ir.scans import is_var, size_of
from jaxmem.linting._kept import definition_of
from jaxmem.linting._subject import (
    LEAST,
    Finding,
    Subject,
    SubjectLevel,
    array,
    place,
    scans,
)


@dataclass
class _StackedValue:
    """One value of a scan, and the outputs in which the scan stacks it."""

    is_carry: bool  # whether it is a carry
    is_own: bool  # whether an op of this package computes it
    stacks: list[Any] = field(default_factory=list)  # the outputs


def stacked_twice(subject: Subject) -> Iterator[Finding]:
    """Finds a carry stacked both before and after an iteration, or any value twice."""
    for level, eqn in scans(subject.live):
        yield from _findings(level, eqn)


def _findings(level: SubjectLevel, eqn) -> Iterator[Finding]:
    for value in _values(level, eqn):
        stacks = _counted(level, value)
        if len(stacks) > 1:
            what = "carry" if value.is_carry else "value"
            spare = sorted(map(size_of, stacks))[:-1]
            yield Finding(
                check="stacked twice",
                severity="warning",
                what=f"a scan stacks one {what} {len(stacks)} times: "
                f"{array(stacks[0].aval)}",
                bytes=sum(spare),
                remedy=(
                    "jaxmem.schedule keeps one of them; or do not return a carry as an "
                    "output as well, and read it from the stack"
                ),
                **place(level, eqn),
            )


def _values(level: SubjectLevel, eqn) -> list[_StackedValue]:
    """The values that a scan stacks, each with all its stacks."""
    (inner,) = level.inside(eqn)
    n_consts, n_carry = _compat.scan_counts(eqn)
    carries = zip(
        inner.graph.outvars[:n_carry], inner.graph.arguments[n_consts:], strict=False
    )
    # The carry that one iteration returns is the one that the next reads: one value,
    # here under the key of the latter.
    returned = [(definition_of(inner, out), var) for out, var in carries if is_var(out)]
    carry_keys = {definition.key: (var,) for definition, var in returned}
    own_carries = {(var,) for definition, var in returned if definition.is_own}
    values: dict[tuple[Any, ...], _StackedValue] = {}
    ys = zip(eqn.outvars[n_carry:], inner.graph.outvars[n_carry:], strict=True)
    for stack, var in ys:
        if is_var(var) and size_of(stack) >= LEAST:
            definition = definition_of(inner, var)
            key = carry_keys.get(definition.key, definition.key)
            is_own = key in own_carries or definition.is_own
            value = _StackedValue(key in carry_keys.values(), is_own)
            values.setdefault(key, value).stacks.append(stack)
    return list(values.values())


def _counted(level: SubjectLevel, value: _StackedValue) -> list[Any]:
    # Of the result of an op of this package all residuals count as one: that the op and
    # the reader of its result both keep it is how the op works, and not what the user
    # wrote.
    if not value.is_own:
        return value.stacks
    residuals = [v for v in value.stacks if _is_residual(level, v)]
    return residuals[:1] + [v for v in value.stacks if v not in residuals]


def _is_residual(level: SubjectLevel, var) -> bool:
    """Whether the backward pass alone reads a value."""
    readers = [level.graph.eqns[i] for i in level.graph.users.get(var, ())]
    backward = all(map(level.is_backward, readers))
    return bool(readers) and backward and var not in level.graph.outputs
