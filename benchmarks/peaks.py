"""The largest batch of a step on several chips, found in few compiles.

`jaxmem.max_batch` knows nothing but the step. Here what was compiled for one chip says
where to begin on the next, and a large batch need not be exact.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

import jaxmem
from benchmarks._common import MIB
from jaxmem.memory import DoesNotFit
from jaxmem.scheduling import BudgetError

GIB = 1024 * MIB
FIRST = 8  # the batch that is compiled first
FAR = 16  # times as many examples
REFUSED = float("inf")
MOST = 1 << 20  # of a batch
FURTHER = (9 / 8, 5 / 4)  # times a batch above which another one may fit


@dataclass
class Peaks:
    """The peaks of a step by its batch, on one chip after another.

    They are nearly linear from afar, but not between neighbours, where XLA may choose
    other layouts and algorithms: lines go through batches that are far apart. Nor do
    they always rise: where a step would not fit the chip, XLA recomputes by itself, and
    a larger batch may take less than one that was too large.
    """

    step: Callable
    args: Callable[[int], tuple]  # of a batch: the state, parameters first; the rest
    slope: float = 0.0  # bytes an example, of the last line
    seen: dict[str, dict[int, float]] = field(default_factory=dict)  # by chip and batch

    def largest(self, chip: str, room: int, first: int | None = None) -> int:
        """The largest batch in so many bytes; 0 where one example does not fit."""
        fits, guess = 0, first or self._first(room)
        while guess:
            fits = self._up_to(chip, room, fits, guess)
            guess = self._further(chip, room, fits)
        return fits

    def _up_to(self, chip: str, room: int, fits: int, guess: int) -> int:
        """The largest batch from `fits` on below one that does not fit."""
        fails = MOST
        while fits < guess < fails:
            if self._compile(chip, guess) <= room:
                fits = guess
            else:
                fails = guess
            last = fails - unit_of(fails - 1)
            guess = max(fits, min(self._next(chip, room, fits, fails), last))
        return fits

    def _further(self, chip: str, room: int, fits: int) -> int:
        """A batch that fits above one that does not; 0 where none was found."""
        further = {rounded(fits * times) for times in FURTHER} - self.seen[chip].keys()
        fitting = (n for n in sorted(further) if self._compile(chip, n) <= room)
        return next(fitting, 0)

    def _first(self, room: int) -> int:
        """As another chip has it, or a small batch."""
        if not self.slope:
            return FIRST
        points = (point for of in self.seen.values() for point in of.items())
        smallest, peak = min(points)
        return rounded(smallest + (room - peak) / self.slope)

    def _next(self, chip: str, room: int, fits: int, fails: int) -> int:
        """By the line through what fits and what does not, or through all there is."""
        found = {n: y for n, y in self.seen[chip].items() if y < REFUSED}
        if fails not in found and fails < MOST:
            return (fits + fails) // 2  # refused, without bytes
        between = fits in found and fails in found
        ends = (fits, fails) if between else (min(found), max(found))
        rise = found[ends[1]] - found[ends[0]]
        if rise > 0:
            self.slope = rise / (ends[1] - ends[0])
        elif not self.slope:
            held = self.args(0)  # the gradients are as large as the parameters
            rise = found[ends[0]] - bytes_of((held, held[0][0]))
            if rise <= 0:  # a batch so small says nothing
                return FAR * ends[0]
            self.slope = rise / ends[0]
        return rounded(ends[0] + (room - found[ends[0]]) / self.slope)

    def _compile(self, chip: str, batch: int) -> float:
        """Bytes of the compiled step."""
        how = {"target": chip, "donate_argnums": 0}
        try:
            found = jaxmem.estimate(self.step, *self.args(batch), **how).peak_bytes
        except (DoesNotFit, BudgetError):
            found = REFUSED
        self.seen.setdefault(chip, {})[batch] = found
        print(" ", chip, batch, f"{found / GIB:.2f} GiB", flush=True)
        return found


def rounded(batch: float) -> int:
    """Down to a multiple of its unit; at least 1, which is compiled before given up."""
    whole = max(1, int(batch))
    return whole - whole % unit_of(whole)


def unit_of(batch: int) -> int:
    """What a batch of this size is a multiple of: 1 up to 31, 2 up to 63, and so on."""
    return 1 << max(0, batch.bit_length() - 5)


def bytes_of(tree: Any) -> int:
    """Of arrays on a chip, which holds two uint4 in a byte."""
    bits = jax.dtypes.itemsize_bits
    return sum(x.size * bits(x.dtype) for x in jax.tree.leaves(tree)) // 8
