"""What the compiled peaks of some candidates tell of the others."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._searched import Candidate
from jaxmem.scheduling.search.result import Trial


def known_peaks(choices: Iterable[Choice], tried: Iterable[Trial]) -> dict[int, float]:
    """Compiled peaks of those choices that were tried, by number."""
    peaks = {t.choice: t.peak for t in tried}
    return {i: peaks[c] for i, c in enumerate(choices) if c in peaks}


@dataclass
class Peaks:
    """Candidates, some of them compiled.

    Attributes:
      candidates: by descending bytes and ascending seconds.
      budget: bytes.
      known: compiled peaks, by number of the candidate.
      rest: a peak less the bytes kept, as another front had it.
    """

    candidates: Sequence[Candidate]
    budget: int
    known: dict[int, float] = field(default_factory=dict)
    rest: float | None = None

    def gain(self, rich: int, poor: int) -> float:
        """Seconds that one candidate takes less than another."""
        return self.candidates[poor].seconds - self.candidates[rich].seconds

    def unfit(self, below: int) -> int:
        """The last candidate before one that is known not to fit; -1 for none."""
        unfit = (i for i, peak in self.known.items() if peak > self.budget)
        return max((i for i in unfit if i < below), default=-1)

    def guess(self, above: int, fits: int) -> int:
        """The first candidate, between those known, that is expected to fit."""
        for i in range(above + 1, min(fits, len(self.candidates))):
            if self.expected(i) <= self.budget:
                return i
        return fits if fits < len(self.candidates) else len(self.candidates) - 1

    def expected(self, i: int) -> float:
        """From the nearest that was compiled, or between two that were."""
        if not self.known:
            return 0.0 if self.rest is None else self.candidates[i].bytes + self.rest
        known = [k for k, peak in self.known.items() if math.isfinite(peak)]
        if not known:
            return math.inf
        rich = max((k for k in known if k <= i), default=None)
        poor = min((k for k in known if k >= i), default=None)
        if rich is not None and poor is not None:
            ends = poor, rich  # np.interp wants them ascending
            kept = [self.candidates[k].bytes for k in ends]
            peaks = [self.known[k] for k in ends]
            return float(np.interp(self.candidates[i].bytes, kept, peaks))
        near = max(known) if poor is None else poor
        return self.known[near] + self.candidates[i].bytes - self.candidates[near].bytes
