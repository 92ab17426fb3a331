"""Goals that are followed depth first, without recursion.

A sum of thousands of terms is taken apart term by term: a search that called itself for
each would be deeper than Python's stack.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxmem.rewriting._partial_match import PartialMatch

Goal = Callable[[PartialMatch], "Iterator[Step]"]
# A partial match, and the goals that are left of the one that was followed.
Step = tuple[PartialMatch, tuple[Goal, ...]]
_Goals = tuple[Goal, Any] | None  # the next one, and those behind it


def done(states: Iterable[PartialMatch]) -> Iterator[Step]:
    """Partial matches of which nothing is left to do."""
    return ((state, ()) for state in states)


def solutions(goal: Goal, start: PartialMatch, most: int) -> Iterator[PartialMatch]:
    """Every partial match in which a goal is reached, `most` goals being followed."""
    ways: list[Iterator[tuple[PartialMatch, _Goals]]] = [iter([(start, (goal, None))])]
    while ways:
        step = next(ways[-1], None)
        if step is None:
            ways.pop()
            continue
        state, goals = step
        if goals is None:
            yield state
        elif not most:
            return
        else:
            most -= 1
            first, rest = goals
            ways.append(_before(rest, first(state)))


def _before(
    rest: _Goals, steps: Iterator[Step]
) -> Iterator[tuple[PartialMatch, _Goals]]:
    """The steps, with the goals that were behind the one that was followed."""
    for state, goals in steps:
        left = rest
        for goal in reversed(goals):
            left = goal, left
        yield state, left
