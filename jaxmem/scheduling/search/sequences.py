"""Candidates that recompute in sequences of their own; a step's are remembered."""

from typing import Any

from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.order.ordered import PATIENCE, sequences
from jaxmem.scheduling.search.front import Candidate
from jaxmem.scheduling.search.traced_step import TracedStep

_REMEMBERED = 8  # steps

# by fingerprint, target, and how the step's inputs are spread over devices
_SEQUENCES: dict[tuple[Any, ...], list[Candidate]] = {}


def of_sequences(step: TracedStep, jaxpr: Any, left: float) -> list[Candidate]:
    """The candidates of a jaxpr without orders, found in the seconds that are left."""
    if left < PATIENCE:
        return _looked_for(step, jaxpr, left)
    # time ends some of these searches: another budget gets the same sequences
    key = step.fingerprint, step.target, step.spreads
    found = _SEQUENCES.get(key)
    if found is None:
        found = _SEQUENCES[key] = _looked_for(step, jaxpr, PATIENCE)
        for old in list(_SEQUENCES)[:-_REMEMBERED]:
            _SEQUENCES.pop(old, None)
    return found


def _looked_for(step: TracedStep, jaxpr: Any, patience: float) -> list[Candidate]:
    how = step.target, patience, step.spreads
    found = sequences(jaxpr, step.aliases(jaxpr), *how)
    return [
        Candidate(Choice(step.target, (order,)), peak, seconds)
        for order, peak, seconds in found
    ]
