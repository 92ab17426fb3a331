"""Candidates that recompute in sequences of their own; a step's are remembered."""

from typing import Any

from jaxmem.scheduling._candidate import Candidate
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.order.ordered import PATIENCE, sequences
from jaxmem.scheduling.search.traced_step import TracedStep

_REMEMBERED = 8  # steps

# by fingerprint, how the step's inputs are spread over devices, and choice
_SEQUENCES: dict[tuple[Any, ...], list[Candidate]] = {}


def of_sequences(step: TracedStep, choice: Choice, left: float) -> list[Candidate]:
    """The candidates with all of a choice, found in the seconds that are left."""
    if left < PATIENCE:
        return _looked_for(step, choice, left)
    # time ends some of these searches: another budget gets the same sequences
    key = step.fingerprint, step.spreads, choice
    found = _SEQUENCES.get(key)
    if found is None:
        found = _SEQUENCES[key] = _looked_for(step, choice, PATIENCE)
        for old in list(_SEQUENCES)[:-_REMEMBERED]:
            _SEQUENCES.pop(old, None)
    return found


def _looked_for(step: TracedStep, choice: Choice, patience: float) -> list[Candidate]:
    # a sequence counts the operations of this jaxpr, and is of no use in another one
    jaxpr = step.rewritten(choice).unordered
    found = sequences(jaxpr, step.aliases(jaxpr), step.target, patience, step.spreads)
    return [
        Candidate(choice.having(order), peak, seconds) for order, peak, seconds in found
    ]
