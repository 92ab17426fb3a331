"""The largest batch that fits a chip, in two compiles where `max_batch` takes more.

The demonstration has three minutes. The peak is close to a straight line in the batch:
a second compile gives the line, a third confirms what it predicts, rounded down to two
digits. `jaxmem.max_batch` finds the exact number.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import jaxmem

_FACTOR = 64  # between the two batches the line goes through


@dataclass(frozen=True)
class Largest:
    """A batch size, and whether a compile has shown that it fits."""

    batch: int
    confirmed: bool


def largest_batch(
    one, target: str, small: tuple[int, int], deadline: float, n: int = 1
) -> Largest:
    """The largest batch, to two digits, that `n` divides.

    Args:
        one: the probe of a run.
        target: the chip.
        small: a batch size and the bytes its step takes there.
        deadline: of `time.monotonic()`; after it a prediction is left unconfirmed.
        n: micro-batches a step.
    """
    room = {t.name: t.memory_bytes for t in jaxmem.targets()}[target]
    assert room is not None  # a chip: no batch is the largest on cpu

    def peak(batch):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no time left to look for the largest batch")
        return jaxmem.estimate(
            one.step,
            *one.make_args(batch),
            target=target,
            donate_argnums=(0,),
            timeout=left,
        ).peak_bytes

    batch = small[0] * _FACTOR
    guess = rounded(predicted(room, small, (batch, peak(batch)))) // n * n
    return Largest(guess, _fits(peak, guess, room))


def _fits(peak: Callable[[int], int], batch: int, room: int) -> bool:
    try:
        return peak(batch) <= room
    except (TimeoutError, RuntimeError):  # no time left, or the compiler ran out
        return False


def predicted(room: int, a: tuple[int, int], b: tuple[int, int]) -> int:
    """Where the line through two (batch, bytes) crosses the room there is."""
    slope = (b[1] - a[1]) / (b[0] - a[0])
    return int(b[0] + (room - b[1]) / slope)


def rounded(batch: int) -> int:
    """Down to two digits: 2,671 is 2,600."""
    unit = 10 ** max(0, len(str(batch)) - 2)
    return batch // unit * unit
