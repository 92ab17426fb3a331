"""What a thing is made of, before it: a walk as deep as a graph, without recursion.

A step of a few hundred written-out leaves adds them up in a chain that is longer than
Python's stack.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def operands_first(last: T, missing: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """`last` and all that it waits for, each behind what it waits for itself.

    Args:
      last: what is wanted; it may be there already.
      missing: what one waits for that is not there yet. It is asked anew before each:
        whoever takes what this yields has to make it, unless it is there by then.
    """
    todo = [last]
    while todo:
        before = list(missing(todo[-1]))
        todo += reversed(before)
        if not before:
            yield todo.pop()
