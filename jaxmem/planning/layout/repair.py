"""Local search for a layout within a height: a buffer that does not fit ejects others.

It can move a little free space from many places to where it is missing, which a search
that places buffers for good cannot. It proves nothing. Source: ejection with counters
as Nagata and Bräysy use it for vehicles (Operations Research Letters 37 (2009), doi
10.1016/j.orl.2009.04.006).
"""

import time

import numpy as np

from jaxmem.planning.layout.bottom import BottomStack
from jaxmem.planning.layout.fit import tightest
from jaxmem.planning.layout.incumbent import Incumbent
from jaxmem.planning.layout.problem import LayoutProblem

NOISE = 0.3  # relative, in the cost of an offset
CLOCK_STEPS = 64  # steps between two reads of the clock
PATIENCE = 4, 2_000  # steps without a gain: a multiple of the buffers; at least
CACHED = 20_000_000  # entries of lists of neighbours that are cached, against memory
STEPS = 0.7, 0.98  # the share of the excess over the goal to aim at: at first; at most
SLICE = 0.25, 0.5  # of the time that is left, for one repair; seconds, at least


class RepairSearch:
    """Repairs layouts under heights between the goal and the best so far."""

    def __init__(
        self, incumbent: Incumbent, bottom: BottomStack, repair: "EjectionRepair"
    ):
        self._incumbent, self._bottom, self._repair = incumbent, bottom, repair
        self._step, self._patience = STEPS[0], 1
        self._start = bottom.offsets if bottom.long.any() else incumbent.offsets

    def iterate(self, deadline: float) -> None:
        """Repairs once; the height aimed at falls after a success, else it rises."""
        incumbent, bottom = self._incumbent, self._bottom
        goal = max(incumbent.goal, bottom.need)
        target = goal + int((incumbent.height - 1 - goal) * self._step)
        left = deadline - time.monotonic()
        until = time.monotonic() + min(left, max(SLICE[0] * left, SLICE[1]))
        if not bottom.long.any():
            self._start = incumbent.offsets
        begin = self._start[bottom.rest]
        found = self._repair.run(begin, target, self._patience, until)
        if found is not None:
            self._start = bottom.with_rest(found)
            incumbent.offer(self._start)
            return
        self._step = (1 + self._step) / 2
        if self._step > STEPS[1]:
            self._step, self._patience = STEPS[0], 2 * self._patience


class EjectionRepair:
    """Repairs layouts of one problem, within one height after another."""

    def __init__(self, problem: LayoutProblem, seed: int):
        self._problem, self._random = problem, np.random.default_rng(seed)
        size = problem.size * problem.length.astype(np.float64)
        self._area = size / max(size.mean(), 1.0) if len(size) else size
        self._beside: dict[int, list[np.ndarray]] = {}
        self._cached = 0

    def run(
        self, offsets: np.ndarray, height: int, patience: float, deadline: float
    ) -> np.ndarray | None:
        """Offsets within the height, or None if they were not found."""
        # Buffers that lie too high in the given layout are unplaced at first.
        problem = self._problem
        if (problem.floor + problem.size > height).any():
            return None
        self._low = offsets[problem.rectangles.owner] + problem.rectangles.low
        self._top = offsets[problem.rectangles.owner] + problem.rectangles.high
        self._offsets, self._height = offsets.copy(), height
        lies = offsets + problem.size <= height
        self._lies = lies[problem.rectangles.owner]
        self._weight = self._area.copy()
        waiting = set(np.flatnonzero(~lies).tolist())
        least, since = len(waiting), 0
        patience *= max(PATIENCE[0] * len(lies), PATIENCE[1])
        steps = 0
        while waiting:
            steps, since = steps + 1, since + 1
            if since > patience:
                return None
            if steps % CLOCK_STEPS == 0 and time.monotonic() > deadline:
                return None
            buffer = max(waiting, key=self._area.__getitem__)
            waiting.remove(buffer)
            waiting.update(self._put(buffer))
            if len(waiting) < least:
                least, since = len(waiting), 0
        return self._offsets

    def _put(self, buffer: int) -> list[int]:
        """Places a buffer; returns the buffers that it ejects."""
        problem = self._problem
        rows, below, top = self._forbidden(buffer)
        most = self._height - int(problem.size[buffer])
        floor, alignment = int(problem.floor[buffer]), int(problem.alignment[buffer])
        order = below.argsort(kind="stable")
        offset = tightest(below[order], top[order], floor, alignment, most)
        out: list[int] = []
        if offset < 0:
            # A buffer without a gap gains weight, so that two do not eject each other
            # for ever.
            self._weight[buffer] += self._area[buffer]
            offset = self._cheapest(rows, below, top, floor, alignment, most)
            hit = rows[(below < offset) & (top > offset)]
            out = np.unique(problem.rectangles.owner[hit]).tolist()
            for other in out:
                self._lies[self._mine(other)] = False
        mine = self._mine(buffer)
        self._offsets[buffer] = offset
        self._low[mine] = offset + problem.rectangles.low[mine]
        self._top[mine] = offset + problem.rectangles.high[mine]
        self._lies[mine] = True
        return out

    def _mine(self, buffer: int) -> slice:
        return slice(self._problem.start[buffer], self._problem.start[buffer + 1])

    def _forbidden(self, buffer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Placed rectangles beside a buffer, and the offsets at which each is hit."""
        rectangles, ranges = self._problem.rectangles, []
        first = self._problem.start[buffer]
        for rectangle, near in enumerate(self._neighbours(buffer), first):
            rows = near[self._lies[near]]
            below = self._low[rows] - rectangles.high[rectangle]
            ranges.append((rows, below, self._top[rows] - rectangles.low[rectangle]))
        if len(ranges) == 1:
            return ranges[0]
        rows, below, top = (np.concatenate(x) for x in zip(*ranges, strict=True))
        return rows, below, top

    def _neighbours(self, buffer: int) -> list[np.ndarray]:
        """For each rectangle of a buffer, those of others that overlap it in time."""
        if buffer in self._beside:
            return self._beside[buffer]
        rectangles, mine = self._problem.rectangles, self._mine(buffer)
        beside = []
        each = zip(rectangles.first[mine], rectangles.end[mine], strict=True)
        for first, end in each:
            together = (rectangles.first < end) & (rectangles.end > first)
            together[mine] = False
            beside.append(np.flatnonzero(together))
        size = sum(map(len, beside))
        if self._cached + size <= CACHED:
            self._cached += size
            self._beside[buffer] = beside
        return beside

    def _cheapest(self, rows, below, top, floor, alignment, most: int) -> int:
        """The offset whose ejected buffers have the least weight, with some noise."""
        starts = np.concatenate([[floor, most], top, below])
        up = -(-starts // alignment) * alignment
        starts = np.concatenate([up, up - alignment]) if alignment > 1 else up
        starts = starts[(starts >= floor) & (starts <= most)]
        weight = self._weight[self._problem.rectangles.owner[rows]]
        begun, done = below.argsort(), top.argsort()
        sums = [np.append(0.0, weight[o].cumsum()) for o in (begun, done)]
        cost = sums[0][np.searchsorted(below[begun], starts, "left")]
        cost = cost - sums[1][np.searchsorted(top[done], starts, "right")]
        cost *= 1 + NOISE * self._random.random(len(cost))
        return int(starts[cost.argmin()])
