"""Cases of which a few are in the fast suite, and the others in the slow one.

Which are fast does not hang on the place in a list, so that a new case leaves the
others where they are. Where cases differ in what they go through, the fast ones are
named: one for each way through the code (`some_fast`, or of several parameters the
mark `fast`). Where there are many and all are alike, their names decide (`one_of`), or
the first of a kind stands for it (`first_fast`): any few will do, but always the same.

In the fast suite every op has its values and gradients once in float32 and once in
bfloat16; a transformation, a dtype or a chip is there once for each mechanism. Their
full product is in the slow suite.
"""

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def some_fast(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """The cases, all but those named in `fast` marked slow."""
    cases = list(cases)
    assert all(one in cases for one in fast), f"fast: {fast}, of {cases}"
    return [c if c in fast else pytest.param(c, marks=pytest.mark.slow) for c in cases]


def first_fast(cases: Iterable[Any], kind: Callable[[Any], Any]) -> list[Any]:
    """The cases, marked slow where an earlier one is of the same kind."""
    seen, marked = set(), []
    for case in cases:
        marks = slow_unless(kind(case) not in seen)
        seen.add(kind(case))
        marked.append(pytest.param(case, marks=marks))
    return marked


def one_of(count: int, name: str) -> int:
    """A number below `count` that the name alone decides."""
    return zlib.crc32(name.encode()) % count


def slow_unless(fast: bool) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a case."""
    return () if fast else (pytest.mark.slow,)
