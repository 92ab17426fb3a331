"""The largest batch whose step fits, found in few compiles.

The peak of a step is nearly linear in the batch size, so two compiles predict where it
crosses the limit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxmem._bytes import format_bytes, parse_bytes
from jaxmem._checks import check_bool, check_callable, check_int
from jaxmem._progress import spinner
from jaxmem.chips import Target, get_target
from jaxmem.memory._estimate import estimate
from jaxmem.memory.compile.answer import DoesNotFit

_TOO_MUCH = float("inf")
_LINEAR = 6  # compiles after which the peak is no longer taken to be linear


def max_batch(
    fn: Callable,
    make_args: Callable[[int], Any],
    target: str | Target | None = None,
    memory: int | str | None = None,
    *,
    multiple_of: int = 1,
    limit: int = 1 << 20,
    progress: bool = True,
    **options: Any,
) -> int:
    """Finds the largest batch size whose step fits in memory.

    Args:
      fn: the step, as for `jaxmem.estimate`.
      make_args: from a batch size to the step's arguments, a tuple (or one argument);
        `jax.ShapeDtypeStruct` will do.
      target: a name of `jaxmem.targets()`, "cpu" by default.
      memory: bytes on one device, or a text like "14GiB"; the target's own by default,
        needed for "cpu".
      multiple_of: only batch sizes that this number divides.
      limit: the largest batch size to try.
      progress: show a progress bar, where the output is a terminal.
      **options: passed on to `jaxmem.estimate`, such as `donate_argnums`.

    Returns:
      The largest batch size that was compiled and fits; 0 if not even `multiple_of`
      does.

    Raises:
      ValueError: no memory known, or sizes that make no sense.
      RuntimeError: see `jaxmem.estimate`; running out of memory is no error here.

    Example::

      def make_args(size):
          return state, jax.ShapeDtypeStruct((size, 4), jnp.int32)

      print(jaxmem.max_batch(step, make_args, target="cpu", memory="64MiB"))
    """
    chip = get_target(target)
    room = _room(chip, memory)
    check_callable("fn", fn)
    check_callable("make_args", make_args, "a function of a batch size")
    check_bool("progress", progress)
    multiple_of = check_int("multiple_of", multiple_of, 1)
    limit = check_int("limit", limit, 1)
    if limit < multiple_of:
        raise ValueError(
            f"multiple_of={multiple_of}, limit={limit}: need 1 <= multiple_of <= limit"
        )

    def peak(units: int) -> float:
        args = make_args(units * multiple_of)
        args = args if isinstance(args, tuple) else (args,)
        try:
            return estimate(fn, *args, target=chip, **options).peak_bytes
        except DoesNotFit:
            return _TOO_MUCH

    search = BatchSearch(peak, room, limit // multiple_of)
    with spinner(progress, f"largest batch in {format_bytes(room)}") as show:
        for units in search.steps():
            show(f"compiling batch {units * multiple_of}")
            search.measure(units)
    return search.fits * multiple_of


def _room(chip: Target, memory: int | str | None) -> int:
    room = chip.memory_bytes if memory is None else parse_bytes(memory, "memory")
    if room is None:
        raise ValueError(
            f"max_batch: the memory of target {chip.name!r} is not known: pass "
            "memory=, in bytes or as text like '14GiB'"
        )
    if room <= 0:
        raise ValueError(f"memory={memory!r}: must be more than 0")
    return room


@dataclass
class BatchSearch:
    """The sizes to try, given the peaks measured so far."""

    peak: Callable[[int], float]  # from a size to the bytes that it takes
    room: int  # the bytes that there are
    limit: int  # the largest size to try
    known: dict[int, float] = field(default_factory=dict)  # the peaks measured so far

    def measure(self, units: int) -> None:
        """Compiles one size."""
        self.known[units] = self.peak(units)

    @property
    def fits(self) -> int:
        """The largest size known to fit."""
        return max((u for u, b in self.known.items() if b <= self.room), default=0)

    @property
    def fails(self) -> int:
        """The smallest size known not to fit."""
        over = (u for u, b in self.known.items() if b > self.room)
        return min(over, default=self.limit + 1)

    def steps(self) -> Iterator[int]:
        """Sizes to measure, until one fits and the next one does not."""
        # The answer need not be the largest one where a step takes less memory for a
        # larger batch, because the compiler has switched algorithms.
        yield 1
        if self.fits and self.limit > 1:
            yield 2
        while self.fails - self.fits > 1:
            yield self._next()

    def _next(self) -> int:
        """The predicted answer or its neighbour; bisection where it is not linear."""
        low, high = self.fits, self.fails
        guess = self._predicted()
        unbounded = high > self.limit
        if guess is None:
            guess = low * 2 if unbounded else (low + high) // 2
        elif guess <= low:
            guess = low + 1
        elif guess >= high:
            guess = high - 1
        if len(self.known) > _LINEAR:
            # no line: double or halve, instead of approaching in small steps
            guess = max(guess, low * 2) if unbounded else (low + high) // 2
        return max(low + 1, min(guess, high - 1, self.limit))

    def _predicted(self) -> int | None:
        """Where the line through the two largest finite peaks crosses the limit."""
        points = sorted((u, b) for u, b in self.known.items() if b < _TOO_MUCH)[-2:]
        if len(points) < 2:
            return None
        (u0, b0), (u1, b1) = points
        slope = (b1 - b0) / (u1 - u0)
        return int(u0 + (self.room - b0) / slope) if slope > 0 else None
