"""The largest batch of a step on several chips, found in few compiles.

The search is that of `jaxmem.max_batch`. Here what was compiled for one chip says where
to begin on the next, and a large batch need not be exact.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

import jaxmem
from benchmarks._common import MIB
from jaxmem.memory import REFUSED, BatchSearch, DoesNotFit
from jaxmem.scheduling import BudgetError

GIB = 1024 * MIB
FIRST = 8  # the batch that is compiled first
MOST = 1 << 20  # of a batch


@dataclass
class Peaks:
    """The peaks of a step by its batch, on one chip after another."""

    step: Callable
    args: Callable[[int], tuple]  # of a batch: the state, parameters first; the rest
    slope: float = 0.0  # bytes an example, of the last line
    seen: dict[str, dict[int, float]] = field(default_factory=dict)  # by chip and batch

    def largest(self, chip: str, room: int, first: int | None = None) -> int:
        """The largest batch in so many bytes; 0 where one example does not fit."""
        how = {"first": first or self._first(room), "exact": False, "slope": self.slope}
        search = BatchSearch(partial(self._compile, chip), room, MOST, **how)
        for batch in search.steps():
            search.measure(batch)
        self.slope, self.seen[chip] = search.slope, search.known
        return search.fits

    def _first(self, room: int) -> int:
        """As another chip has it, or a small batch."""
        if not self.slope:
            return FIRST
        points = (point for of in self.seen.values() for point in of.items())
        smallest, peak = min(points)
        return max(1, int(smallest + (room - peak) / self.slope))

    def _compile(self, chip: str, batch: int) -> float:
        """Bytes of the compiled step."""
        how = {"target": chip, "donate_argnums": 0}
        try:
            found = jaxmem.estimate(self.step, *self.args(batch), **how).peak_bytes
        except (DoesNotFit, BudgetError):
            found = REFUSED
        print(" ", chip, batch, f"{found / GIB:.2f} GiB", flush=True)
        return found


def bytes_of(tree: Any) -> int:
    """Of arrays on a chip, which holds two uint4 in a byte."""
    bits = jax.dtypes.itemsize_bits
    return sum(x.size * bits(x.dtype) for x in jax.tree.leaves(tree)) // 8
