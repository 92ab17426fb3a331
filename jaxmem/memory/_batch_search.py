"""Which batch sizes to compile to find a large one that fits, in few compiles.

Peaks are nearly linear in the batch from afar, but not between neighbours, where a
compiler may choose other layouts and algorithms: lines go through sizes that are far
apart. Nor do they always rise: a size that the hardware's tiles divide may take less
than a smaller one, and so may one at which XLA recomputes by itself. So round numbers
come first, and two beyond the largest of them that fits, before the rest is exact.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

REFUSED = float("inf")  # bytes of a size that the compiler finds no way to fit
FURTHER = (9 / 8, 5 / 4)  # times a size above which another one may fit
_FAR = 4  # times a size of which nothing else is known
_LINEAR = 6  # compiles after which every other size halves what is left


@dataclass
class BatchSearch:
    """The sizes to try, given the peaks measured so far.

    Attributes:
      peak: from a size to the bytes that it takes.
      room: the bytes that there are.
      limit: the largest size to try.
      first: the size to begin with.
      exact: whether the size after the one that is found does not fit; else it is a
        round number: up to 31 any, up to 63 a multiple of 2, up to 127 of 4, and so on.
      slope: bytes that one more takes, by the last line.
      known: the peaks measured so far.
    """

    peak: Callable[[int], float]
    room: int
    limit: int
    first: int = 1
    exact: bool = True
    slope: float = 0.0
    known: dict[int, float] = field(default_factory=dict)

    def measure(self, size: int) -> None:
        """Compiles one size."""
        self.known[size] = self.peak(size)

    @property
    def fits(self) -> int:
        """The largest size known to fit."""
        return max((n for n, b in self.known.items() if b <= self.room), default=0)

    @property
    def fails(self) -> int:
        """The smallest size above it that is known not to fit."""
        over = (n for n, b in self.known.items() if b > self.room and n > self.fits)
        return min(over, default=self.limit + 1)

    def steps(self) -> Iterator[int]:
        """Sizes to measure, one after the other."""
        guess = self._round(self.first)
        while guess:
            while self.fits < guess < self.fails:
                yield guess
                guess = self._next()
            guess = 0
            for size in self._further():
                yield size
                if size == self.fits:
                    guess = self._next()
                    break
        while self.exact and self.fails - self.fits > 1:
            yield max(self.fits + 1, min(int(self._guess()), self.fails - 1))

    def _further(self) -> list[int]:
        """Sizes above the one that fits, for which the line does not speak."""
        sizes = {self._round(self.fits * times) for times in FURTHER if self.fits}
        return sorted(n for n in sizes - self.known.keys() if n > self.fits)

    def _next(self) -> int:
        """The round number that is predicted to fit; what fits where it is that one."""
        last = self.fails - 1
        most = self._round(last) if last else 0
        return max(self.fits, min(self._round(self._guess()), most))

    def _guess(self) -> float:
        crooked = len(self.known) > _LINEAR and len(self.known) % 2 == 0
        predicted = None if crooked else self._predicted()
        if predicted is not None:
            return predicted
        unbounded = self.fails > self.limit
        return _FAR * self.fits if unbounded else (self.fits + self.fails) // 2

    def _predicted(self) -> float | None:
        """Where the line through what fits and what does not has the bytes there are.

        Where one of them is not known, through all that is.
        """
        found = {n: y for n, y in self.known.items() if y < REFUSED}
        if not found or (self.fails in self.known and self.fails not in found):
            return None  # refused, without bytes
        between = self.fits in found and self.fails in found
        start, end = (self.fits, self.fails) if between else (min(found), max(found))
        if found[end] > found[start]:
            self.slope = (found[end] - found[start]) / (end - start)
        return start + (self.room - found[start]) / self.slope if self.slope else None

    def _round(self, size: float) -> int:
        """Down to a multiple of its unit, from 1 up to the limit."""
        if size >= self.limit:
            return self.limit
        whole = max(1, int(size))
        return whole - whole % unit_of(whole)


def unit_of(size: int) -> int:
    """What a round number of this size is a multiple of."""
    return 1 << max(0, size.bit_length() - 5)
