"""What a report says of a step that rounds more than its reference."""

from collections.abc import Sequence

from jaxmem.checking._report import LeafDifference
from jaxmem.checking._tolerance import MOST_ROUNDING

_TWICE = 2.0  # as many roundings are in the reference's own tolerance


def roundings_told(leaves: Sequence[LeafDifference]) -> str:
    """A sentence; empty where the step's roundings were not measured, or are as few."""
    known = [leaf for leaf in leaves if leaf.rounding is not None]
    different = [leaf for leaf in known if leaf.ratio > 1]
    if not different:
        return _of_agreeing(known)
    others = [leaf for leaf in different if not _may_be_roundings(leaf)]
    worst = max(others or different, key=lambda leaf: leaf.ratio)
    if not others:
        most = f"up to {MOST_ROUNDING:g} times as far passes"
        return f"it may be rounding alone: {_told(worst)}, and {most}"
    if _times(worst) <= _TWICE:
        return ""
    return f"{_told(worst)}, which does not account for the difference"


def _of_agreeing(known: Sequence[LeafDifference]) -> str:
    """Where the reference's roundings alone would not have been enough."""
    if not known:
        return ""
    most = max(known, key=_times)
    others = sum(_times(leaf) > _TWICE for leaf in known) - 1
    more = f", and {others} more results more than twice" if others > 0 else ""
    return f"the tolerances are of the roundings of both: {_told(most)}{more}"


def _may_be_roundings(leaf: LeafDifference) -> bool:
    """Whether it would pass if the step might round as much as it does."""
    return leaf.ratio * (1 + MOST_ROUNDING) <= 1 + _times(leaf)


def _times(leaf: LeafDifference) -> float:
    return leaf.rounding or 0.0


def _told(leaf: LeafDifference) -> str:
    times = _times(leaf)
    far = f"{times:.0f} times as far" if times >= 10 else f"{times:.2g} times as far"
    return f"rounding moves {leaf.name} {far} in the step as in the reference"
