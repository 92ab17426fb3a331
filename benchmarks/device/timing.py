"""Time on a device: calls chained in one program, sides in turn, medians and spread.

A program calls a function once for each of several sets of arguments, so that neither
the launch nor what caches hold of the last call is timed. Sides of a comparison take
turns, so that a change of the chip's clock meets all of them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device import traces

BYTES = 2**30  # of all sets of arguments together, more than any cache
MOST, FEWEST = 16, 3  # calls in a program


@dataclass
class Chain:
    """Calls of a function in one program.

    Attributes:
      fn: of a set's lasting arguments, and of those that a call may write over.
      lasting: the sets.
      fresh: of the same number; each timing gives copies of them away.
    """

    fn: Callable[..., Any]
    lasting: Sequence[tuple]
    fresh: Sequence[tuple]

    def __post_init__(self):
        def run(lasting, fresh):
            return [self.fn(*a, *b) for a, b in zip(lasting, fresh, strict=True)]

        self._run = jax.jit(run, donate_argnums=1)

    def __call__(self) -> float:
        """Milliseconds of a call."""
        given = jax.block_until_ready(jax.tree.map(jnp.copy, self.fresh))
        begin = time.perf_counter()
        jax.block_until_ready(self._run(self.lasting, given))
        return 1e3 * (time.perf_counter() - begin) / len(self.lasting)

    def device_ms(self) -> float:
        """Milliseconds of a call's kernels by the profiler, without the host's."""
        own = (k for k in traces.kernels(self, 2) if k.module.startswith("jit_run"))
        return 1e3 * sum(kernel.seconds for kernel in own) / len(self.lasting)


def calls(nbytes: int) -> int:
    """How many sets of so many bytes make a chain."""
    return max(FEWEST, min(MOST, BYTES // max(nbytes, 1)))


def in_turn(
    sides: Mapping[str, Callable[[], float]], rounds: int, warm: int = 2
) -> dict[str, dict[str, float]]:
    """Of each side the median, and the quarters below and above it."""
    for _ in range(warm):
        for side in sides.values():
            side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(side())
    return {name: spread(found) for name, found in times.items()}


def spread(times: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.percentile(times, (25, 50, 75))
    names = ("ms", "low", "high")
    return dict(zip(names, (round(x, 5) for x in (middle, low, high)), strict=True))
