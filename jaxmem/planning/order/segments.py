"""Splits a graph into segments that can be ordered separately.

An operation that must run after all those before it and before all those after it is a
memory-insensitive point: what is alive there is the same in every order. The peak is
the largest of the segments' peaks, so each segment can be solved by itself, and only
the worst ones have to be.

Source: ROAM (arXiv:2310.19295), section on independent segments. There the updates of
the weights are set aside first and assigned to segments; here a pass over the whole
graph places them (`sweep`), and no order is excluded.
"""

from collections.abc import Sequence

from jaxmem.planning._live_ranges import OrderProblem


def segment_ranges(problem: OrderProblem) -> list[range]:
    """Ranges of operations that every order runs one after another."""
    after_all = _dominating(problem.before, range(len(problem)))
    before_all = _dominating(problem.after, range(len(problem) - 1, -1, -1))
    points = sorted(i + 1 for i in after_all & before_all)
    starts = [0, *points]
    stops = [*points, len(problem)]
    return [range(a, b) for a, b in zip(starts, stops, strict=True) if a < b]


def _dominating(before: Sequence[tuple[int, ...]], order: Sequence[int]) -> set[int]:
    """Operations that need all those which precede them in this order."""
    dominating: set[int] = set()
    unread: set[int] = set()  # they have run, and nothing that ran since needs them
    for i in order:
        unread.difference_update(before[i])
        unread.add(i)
        if len(unread) == 1:
            dominating.add(i)
    return dominating
