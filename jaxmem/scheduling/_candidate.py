"""A choice that a search may compile, and what is predicted for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxmem.scheduling._choice import Choice

LEAST = 2e-3  # of what is kept at first: what two candidates differ by, or they are one


@dataclass(frozen=True)
class Candidate:
    """A choice, and what is predicted for it."""

    choice: Choice  # what the passes are asked to do
    # what is kept from the forward to the backward pass, or another figure that differs
    # from the peak by about as much on every candidate
    bytes: int
    seconds: float  # of recomputation
    flops: float = 0.0  # of matmuls that are recomputed; only segments have them


def descending(candidates: Sequence[Candidate], least: float) -> list[Candidate]:
    """Those that keep less than the one before, by more than `least` bytes."""
    kept = list(candidates[:1])
    for candidate in candidates[1:]:
        if kept[-1].bytes - candidate.bytes > least:
            kept.append(candidate)
    return kept


@dataclass(frozen=True)
class Between:
    """Some layers like one candidate, the others like another.

    Attributes:
      layers: how many there are.
      first: the candidate in which so many of the first take fewer bytes.
      gain: seconds that the whole takes if all do.
    """

    layers: int
    first: Callable[[int], Candidate]
    gain: float
