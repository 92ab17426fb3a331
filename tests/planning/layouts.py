"""Buffers to lay out: with gaps and alignments, at random, of a training step."""

import itertools

import numpy as np
from hypothesis import strategies as st

from jaxmem.planning import Buffer, Gap, Layout


@st.composite
def buffer_lists(draw, most=8, size=6, time=7, alignments=(1, 1, 2, 3)):
    """Buffers of which some have gaps, windows or an alignment."""
    found = []
    for name in range(draw(st.integers(0, most))):
        lower = draw(st.integers(0, time - 1))
        upper = draw(st.integers(lower + 1, time))
        mine = draw(st.integers(0, size))
        cuts = draw(st.lists(st.integers(lower, upper), max_size=4, unique=True))
        cuts = sorted(cuts)
        gaps = []
        for begin, end in zip(cuts[::2], cuts[1::2], strict=False):
            window = None
            if mine and draw(st.booleans()):
                low = draw(st.integers(0, mine - 1))
                window = low, draw(st.integers(low + 1, mine))
            gaps.append(Gap(begin, end, window))
        alignment = draw(st.sampled_from(alignments))
        found.append(Buffer(name, lower, upper, mine, alignment, tuple(gaps)))
    return found


def cells(buffer: Buffer, offset: int) -> set[tuple[int, int]]:
    """(time, byte of the arena) that it takes, said as plainly as can be."""
    found = set()
    for time in range(buffer.lower, buffer.upper):
        low, high = 0, buffer.size
        for gap in buffer.gaps:
            if gap.lower <= time < gap.upper:
                low, high = gap.window or (0, 0)
        found |= {(time, offset + byte) for byte in range(low, high)}
    return found


def sound(found: Layout) -> bool:
    """Whether no two take the same byte at a time, and each is aligned."""
    taken = [cells(b, found.offsets[b.id]) for b in found.buffers]
    return all(a.isdisjoint(b) for a, b in itertools.combinations(taken, 2)) and all(
        found.offsets[b.id] >= 0 and found.offsets[b.id] % b.alignment == 0
        for b in found.buffers
    )


def least_height(buffers: list[Buffer]) -> int:
    """The least height of an arena, by trying all offsets."""
    buffers = sorted(buffers, key=lambda b: -b.size)

    def fits(height: int, at: int, taken: set) -> bool:
        if at == len(buffers):
            return True
        b = buffers[at]
        return any(
            taken.isdisjoint(mine := cells(b, offset))
            and fits(height, at + 1, taken | mine)
            for offset in range(0, height - b.size + 1, b.alignment)
        )

    least = max((b.size for b in buffers), default=0)
    return next(h for h in itertools.count(least) if fits(h, 0, set()))


def exponential(count: int, seed: int, alive: float = 10.0) -> list[Buffer]:
    """Lives and sizes of an exponential distribution, so many alive at once."""
    random = np.random.default_rng(seed)
    lower = random.integers(0, 16 * count, count)
    lives = 1 + random.exponential(16 * alive, count).astype(int)
    sizes = 1 + random.exponential(1000, count).astype(int)
    rows = zip(lower.tolist(), lives.tolist(), sizes.tolist(), strict=True)
    return [Buffer(n, a, a + life, size) for n, (a, life, size) in enumerate(rows)]


def training_step(count: int, seed: int = 0) -> list[Buffer]:
    """Of every 16 buffers 5 are kept for the backward pass and 11 go soon."""
    random = np.random.default_rng(seed)
    layers, span = count // 16, 8  # times of a layer
    end = 2 * layers * span
    rows: list[tuple[int, int, int]] = []
    one = lambda low, high: int(random.integers(low, high))
    for layer in range(layers):
        forward, backward = layer * span, end - (layer + 1) * span
        for _ in range(5):  # kept
            rows.append((forward + one(0, span), end - forward - one(0, span), 64))
        for since in (*[forward] * 4, *[backward] * 5):  # temporaries
            since += one(0, span)
            rows.append((since, since + one(1, 6), 256))
        for _ in range(2):  # gradients, up to the update
            since = backward + one(0, span)
            rows.append((since, since + one(5, 40), 256))
    return [Buffer(n, a, b, 512 * one(1, most)) for n, (a, b, most) in enumerate(rows)]
