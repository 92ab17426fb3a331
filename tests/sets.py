"""Cases of which a few are in the fast suite, and the others in the slow one."""

from collections.abc import Iterable
from typing import Any

import pytest


def some_fast(cases: Iterable[Any], every: int = 2) -> list[Any]:
    """The cases, all but each `every`-th of them marked slow; the first is fast."""
    return [
        case if i % every == 0 else pytest.param(case, marks=pytest.mark.slow)
        for i, case in enumerate(cases)
    ]
