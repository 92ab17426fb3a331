"""The figures of placements, of docs/budget.md."""

import functools
from collections.abc import Callable, Iterable

from benchmarks.figures.rows import TEMP_AND_MS, Row, figures, rows, table, with_older

OURS, ALONE = "schedule", "schedule, recomputing alone"
RANDOM, LARGEST, ORDER = "random", "largest first", "in the order of `schedule`"
JAX, SCHEDULE = "of JAX", "of `schedule`"


def cases() -> list[list[Row]]:
    """The rows of each model and budget."""
    found: dict[tuple[str, str], list[Row]] = {}
    for r in rows("placement"):
        found.setdefault((r["model"], r["at most MiB"]), []).append(r)
    return [*found.values()]


def _ms(r: Row) -> float:
    """Of a row; a budget that is out of reach takes for ever."""
    return float(r["predicted ms"] or "inf")


def _cell(found: Iterable[Row], choose: Callable = min) -> str:
    r = choose(found, key=_ms)
    # without a time a cell says what the least was
    return with_older(r, r, TEMP_AND_MS) if r["predicted ms"] else r["temp MiB"]


def _own(found: list[Row], residuals: str, rule: str = "") -> list[Row]:
    same = [r for r in found if r["residuals"] == residuals]
    return [r for r in same if r["placement"].startswith(rule)]


def _ours(found: list[Row]) -> Row:
    return next(r for r in found if r["placement"] == OURS)


def _placed(found: list[Row]) -> list[Row]:
    return [r for r in found if r["residuals"] in (JAX, SCHEDULE)]


@figures("placement")
def placement() -> str:
    """A line for each model and budget."""
    head = (
        *("model", "at most MiB", "`schedule`: MiB / predicted ms"),
        *("`schedule` without the host", "random, fastest of three", "slowest"),
        *("largest first", "in the order of `schedule`", "all that JAX keeps, fastest"),
    )
    return table(head, map(_line, cases()))


def _line(found: list[Row]) -> list[str]:
    random = _own(found, SCHEDULE, RANDOM)
    return [
        *(found[0]["model"], f"{int(found[0]['at most MiB']):,}"),
        *(_cell([_ours(found)]), _cell(r for r in found if r["placement"] == ALONE)),
        *(_cell(random), _cell(random, max)),
        *(_cell(_own(found, SCHEDULE, rule)) for rule in (LARGEST, ORDER)),
        _cell(_own(found, JAX)),
    ]


def _counted(better: Callable[[float, float], bool], chosen: Callable) -> str:
    pairs = [(r, _ours(found)) for found in cases() for r in chosen(found)]
    return f"{sum(better(_ms(r), _ms(own)) for r, own in pairs)} of {len(pairs)}"


@figures("placement, faster")
def faster() -> str:
    """How many placements take less time than what `schedule` found."""
    return _counted(lambda theirs, ours: theirs < ours, _placed)


@figures("placement, out of reach")
def out_of_reach() -> str:
    """How many placements of what JAX keeps do not come down to their budget."""
    of_jax = lambda found: _own(found, JAX)
    return _counted(lambda theirs, _: theirs == float("inf"), of_jax)


@figures("placement, alone faster")
def alone_faster() -> str:
    """How often recomputation without the host takes less time."""
    alone = lambda found: [r for r in found if r["placement"] == ALONE]
    return _counted(lambda theirs, ours: theirs < ours, alone)


@figures("placement, alone ahead by")
def alone_ahead() -> str:
    """By how many per cent, at most."""
    alone = [next(r for r in c if r["placement"] == ALONE) for c in cases()]
    pairs = zip(alone, map(_ours, cases()), strict=True)
    return f"{max(100 * (1 - _ms(r) / _ms(own)) for r, own in pairs):.1f} %"


@figures("placement, order slower")
def order_slower() -> str:
    """How often the order of `schedule` is slower than the largest first."""
    pairs = [
        [_own(found, SCHEDULE, rule)[0] for rule in (ORDER, LARGEST)]
        for found in cases()
    ]
    return f"{sum(_ms(own) > _ms(large) for own, large in pairs)} of {len(pairs)}"


def _ratios(rule: str) -> str:
    """The predicted time of a rule over ours, the least and the most."""
    found = [_ms(r) / _ms(_ours(c)) for c in cases() for r in _own(c, SCHEDULE, rule)]
    return f"{min(found):.2f} to {max(found):.2f}"


for _name, _rule in {"random": RANDOM, "largest": LARGEST}.items():
    figures(f"placement, {_name}")(functools.partial(_ratios, _rule))
