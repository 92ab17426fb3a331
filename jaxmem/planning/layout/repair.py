"""Local search for a layout within a height: what does not fit drives others out.

Some buffers lie, without overlap and below the height; the rest waits. A buffer that
waits is put into the tightest gap that takes it. If there is none, it is put where what
it overlaps counts least, and that waits from then on. What was driven out, or found no
gap, often counts more, so that two do not drive each other out for ever.

It needs no room to spare in most places to move a little of it to where it is missing;
a search that places buffers for good does. It proves nothing.

Source: ejection with counters as Nagata and Bräysy use it for vehicles (Operations
Research Letters 37 (2009), doi 10.1016/j.orl.2009.04.006).
"""

import time

import numpy as np

from jaxmem.planning.layout.bottom import BottomStack
from jaxmem.planning.layout.fit import tightest
from jaxmem.planning.layout.incumbent import Incumbent
from jaxmem.planning.layout.problem import LayoutProblem

NOISE = 0.3  # in what counts least
CHECKED = 64  # steps between two looks at the clock
PATIENCE = 4, 2_000  # steps without a gain: times the buffers; in any case
KNOWN = 20_000_000  # entries of lists of neighbours that are remembered
STEPS = 0.7, 0.98  # how much of what is over the goal is left, at first; at most
SLICE = 0.25, 0.5  # of the time that is left, for a iterate; seconds, at least


class RepairSearch:
    """Repairs layouts under heights between the goal and the best so far.

    Args:
      incumbent: the problem, and what is known.
      bottom: what stays where it is.
      repair: of the rest.
    """

    def __init__(
        self, incumbent: Incumbent, bottom: BottomStack, repair: "EjectionRepair"
    ):
        self._incumbent, self._bottom, self._repair = incumbent, bottom, repair
        self._step, self._patience = STEPS[0], 1
        self._start = bottom.offsets if bottom.long.any() else incumbent.offsets

    def iterate(self, deadline: float) -> None:
        """One repair: for less height after it was found, for more after it was not."""
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
    """Layouts of one problem, made within one height after another."""

    def __init__(self, problem: LayoutProblem, seed: int):
        self._problem, self._random = problem, np.random.default_rng(seed)
        size = problem.size * problem.length.astype(np.float64)
        self._area = size / max(size.mean(), 1.0) if len(size) else size
        self._beside: dict[int, list[np.ndarray]] = {}
        self._known = 0

    def run(
        self, offsets: np.ndarray, height: int, patience: float, deadline: float
    ) -> np.ndarray | None:
        """Offsets within the height, or None if they were not found.

        Args:
          offsets: of a layout; what lies too high in it waits at first.
          height: in units, at least the load, and the top of each on its floor.
          patience: how long to go on without a gain, 1 being `PATIENCE`.
          deadline: by `time.monotonic`.
        """
        problem = self._problem
        if (problem.floor + problem.size > height).any():
            return None
        self._low = offsets[problem.pieces.owner] + problem.pieces.low
        self._top = offsets[problem.pieces.owner] + problem.pieces.high
        self._offsets, self._height = offsets.copy(), height
        lies = offsets + problem.size <= height
        self._lies = lies[problem.pieces.owner]
        self._weight = self._area.copy()
        waiting = set(np.flatnonzero(~lies).tolist())
        least, since = len(waiting), 0
        patience *= max(PATIENCE[0] * len(lies), PATIENCE[1])
        steps = 0
        while waiting:
            steps, since = steps + 1, since + 1
            if since > patience:
                return None
            if steps % CHECKED == 0 and time.monotonic() > deadline:
                return None
            buffer = max(waiting, key=self._area.__getitem__)
            waiting.remove(buffer)
            waiting.update(self._put(buffer))
            if len(waiting) < least:
                least, since = len(waiting), 0
        return self._offsets

    def _put(self, buffer: int) -> list[int]:
        """Puts a buffer somewhere; what it drives out."""
        problem = self._problem
        rows, below, top = self._forbidden(buffer)
        most = self._height - int(problem.size[buffer])
        floor, alignment = int(problem.floor[buffer]), int(problem.alignment[buffer])
        order = below.argsort(kind="stable")
        offset = tightest(below[order], top[order], floor, alignment, most)
        out: list[int] = []
        if offset < 0:
            self._weight[buffer] += self._area[buffer]
            offset = self._cheapest(rows, below, top, floor, alignment, most)
            hit = rows[(below < offset) & (top > offset)]
            out = np.unique(problem.pieces.owner[hit]).tolist()
            for other in out:
                self._lies[self._mine(other)] = False
        mine = self._mine(buffer)
        self._offsets[buffer] = offset
        self._low[mine] = offset + problem.pieces.low[mine]
        self._top[mine] = offset + problem.pieces.high[mine]
        self._lies[mine] = True
        return out

    def _mine(self, buffer: int) -> slice:
        return slice(self._problem.start[buffer], self._problem.start[buffer + 1])

    def _forbidden(self, buffer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rectangles that lie beside a buffer, and between which offsets each is hit."""
        pieces, found = self._problem.pieces, []
        beside = self._neighbours(buffer)
        for piece, near in zip(
            range(self._mine(buffer).start, self._mine(buffer).stop),
            beside,
            strict=True,
        ):
            rows = near[self._lies[near]]
            below = self._low[rows] - pieces.high[piece]
            found.append((rows, below, self._top[rows] - pieces.low[piece]))
        if len(found) == 1:
            return found[0]
        rows, below, top = (np.concatenate(x) for x in zip(*found, strict=True))
        return rows, below, top

    def _neighbours(self, buffer: int) -> list[np.ndarray]:
        """For each piece of a buffer the pieces of others that are there with it."""
        found = self._beside.get(buffer)
        if found is not None:
            return found
        pieces, mine = self._problem.pieces, self._mine(buffer)
        found = []
        for first, end in zip(pieces.first[mine], pieces.end[mine], strict=True):
            together = (pieces.first < end) & (pieces.end > first)
            together[mine] = False
            found.append(np.flatnonzero(together))
        size = sum(map(len, found))
        if self._known + size <= KNOWN:
            self._known += size
            self._beside[buffer] = found
        return found

    def _cheapest(self, rows, below, top, floor, alignment, most: int) -> int:
        """The offset at which what is hit counts least, with some chance."""
        starts = np.concatenate([[floor, most], top, below])
        up = -(-starts // alignment) * alignment
        starts = np.concatenate([up, up - alignment]) if alignment > 1 else up
        starts = starts[(starts >= floor) & (starts <= most)]
        weight = self._weight[self._problem.pieces.owner[rows]]
        begun, done = below.argsort(), top.argsort()
        sums = [np.append(0.0, weight[o].cumsum()) for o in (begun, done)]
        cost = sums[0][np.searchsorted(below[begun], starts, "left")]
        cost = cost - sums[1][np.searchsorted(top[done], starts, "right")]
        cost *= 1 + NOISE * self._random.random(len(cost))
        return int(starts[cost.argmin()])
