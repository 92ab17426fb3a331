"""How much work a function does, whatever the machine is busy with."""

import sys
from collections.abc import Callable


def lines(fn: Callable[[], object]) -> int:
    """How many lines of Python are run, each round of a loop counted."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fn()
    finally:
        sys.settrace(before)
    return count
