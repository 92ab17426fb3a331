"""Where every order of a graph passes: it falls into parts that can be ordered alone.

An operation that must come after all before it and before all after it is a
memory-insensitive point: what is alive there is the same in every order. The peak is
the largest of the parts' peaks, so each part can be solved by itself, and only the
worst ones need be.

Source: ROAM (arXiv:2310.19295), section on independent segments. There the updates of
the weights are set aside first and assigned to segments; here a pass over the whole
places them (`_sweep.py`), and no order is excluded.
"""

from collections.abc import Sequence

from jaxmem.planning._live_ranges import OrderProblem


def segments(problem: OrderProblem) -> list[range]:
    """Ranges of operations that every order does one after another.

    Args:
      problem: operations numbered in a valid order.
    """
    heads = _alone(problem.before, range(len(problem)))
    tails = _alone(problem.after, range(len(problem) - 1, -1, -1))
    points = [i + 1 for i in range(len(problem)) if i in heads and i in tails]
    starts = [0, *points]
    stops = [*points, len(problem)]
    return [range(a, b) for a, b in zip(starts, stops, strict=True) if a < b]


def _alone(before: Sequence[tuple[int, ...]], order: Sequence[int]) -> set[int]:
    """Operations that, when they are done in this order, need all that was done."""
    found: set[int] = set()
    last: set[int] = set()  # done, and not needed by what was done since
    for i in order:
        last.difference_update(before[i])
        last.add(i)
        if len(last) == 1:
            found.add(i)
    return found
