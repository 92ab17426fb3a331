"""The largest batch whose step fits, and the one with the most examples a second."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxmem._bytes import format_bytes, parse_bytes
from jaxmem._checks import check_bool, check_callable, check_int
from jaxmem._progress import spinner
from jaxmem.chips import Target, get_target, is_timed
from jaxmem.memory._batch_search import REFUSED, BatchSearch
from jaxmem.memory._estimate import estimate
from jaxmem.memory.compile.answer import DoesNotFit


class BatchSize(int):
    """A batch size that was compiled and fits: an `int` that prints what it is worth.

    Attributes:
      at_limit: whether it is the largest size that `limit` and `multiple_of` allow, so
        that larger ones were not tried.
      seconds: of one step of this size, predicted; None without rates of the chip.
    """

    at_limit: bool
    seconds: float | None

    def __new__(
        cls, size: int, at_limit: bool = False, seconds: float | None = None
    ) -> "BatchSize":
        found = super().__new__(cls, size)
        found.at_limit, found.seconds = at_limit, seconds
        return found

    @property
    def per_second(self) -> float | None:
        """Examples a second of one device, predicted; None without rates."""
        return int(self) / self.seconds if self.seconds else None

    def __repr__(self) -> str:
        told = []
        if self.at_limit:
            told.append("the limit: larger ones were not tried")
        if self.seconds:
            ms, rate = 1e3 * self.seconds, self.per_second
            told.append(f"predicted {ms:,.4g} ms a step, {rate:,.4g} examples a second")
        return f"{int(self)} ({'; '.join(told)})" if told else f"{int(self)}"

    def __reduce__(self) -> tuple:
        return BatchSize, (int(self), self.at_limit, self.seconds)


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
) -> BatchSize:
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
      The largest batch size that was compiled and fits, an `int`; 0 if not even
      `multiple_of` does. The next size was compiled and does not fit, nor do an eighth
      and a quarter more: peaks do not always grow with the batch, so one in between
      may. `.at_limit` tells whether `limit` has ended the search, `BatchSize.seconds`
      and `.per_second` what a step of this size is predicted to take; so does its text.

    Raises:
      ValueError: no memory known, or sizes that make no sense.
      RuntimeError: see `jaxmem.estimate`; running out of memory is not an error here.

    Example::

      def make_args(size):
          return state, jax.ShapeDtypeStruct((size, 4), jnp.int32)

      print(jaxmem.max_batch(step, make_args, target="cpu", memory="64MiB"))
    """
    chip, room = _checked(fn, make_args, target, memory, multiple_of, limit, progress)
    tried = _Tried(fn, make_args, chip, options)
    return _largest(tried, room, multiple_of, limit, progress)


def best_batch(
    fn: Callable,
    make_args: Callable[[int], Any],
    target: str | Target | None = None,
    memory: int | str | None = None,
    *,
    multiple_of: int = 1,
    limit: int = 1 << 20,
    progress: bool = True,
    **options: Any,
) -> BatchSize:
    """Finds the batch size that fits with the most predicted examples per second.

    It compiles the sizes on the way to the largest that fits, and smaller round
    ones: products run in tiles, so a slightly smaller batch may be much faster.

    Args:
      fn: the step, as for `jaxmem.estimate`.
      make_args: as for `jaxmem.max_batch`.
      target: a name of `jaxmem.targets()` that has rates: not "cpu".
      memory: bytes on one device, or a text like "14GiB"; the target's own by default.
      multiple_of: only batch sizes that this number divides.
      limit: the largest batch size to try.
      progress: show a progress bar, where the output is a terminal.
      **options: passed on to `jaxmem.estimate`, such as `donate_argnums`.

    Returns:
      A size, an `int` with `BatchSize.seconds` and `.per_second`; 0 if not even
      `multiple_of` fits.

    Raises:
      ValueError: no memory or no rates known, or sizes that make no sense.
      RuntimeError: see `jaxmem.estimate`.

    Example::

      def make_args(size):
          return state, jax.ShapeDtypeStruct((size, 4), jnp.int32)

      print(jaxmem.best_batch(step, make_args, target="h100", memory="64MiB"))
    """
    chip, room = _checked(fn, make_args, target, memory, multiple_of, limit, progress)
    if not is_timed(chip.name):
        raise ValueError(f"target={chip.name!r}: no rates of it are known, for seconds")
    tried = _Tried(fn, make_args, chip, options)
    largest = _largest(tried, room, multiple_of, limit, progress)
    with spinner(progress, "the most examples a second") as show:
        for size in _round(int(largest), multiple_of):
            show(f"compiling batch {size}")
            tried(size)
    fits = {n: tried.seconds[n] for n, peak in tried.peaks.items() if peak <= room}
    best = max(fits, key=lambda n: n / fits[n], default=0)
    return BatchSize(best, largest.at_limit and best == largest, fits.get(best))


@dataclass
class _Tried:
    """The sizes that were compiled.

    Attributes:
      peaks: of each size in bytes.
      seconds: of a step of each size, predicted.
    """

    fn: Callable
    make_args: Callable[[int], Any]
    chip: Target
    options: dict[str, Any]
    peaks: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, Any] = field(default_factory=dict)

    def __call__(self, size: int) -> float:
        """The peak of a step of this size."""
        if size not in self.peaks:
            args = self.make_args(size)
            args = args if isinstance(args, tuple) else (args,)
            try:
                report = estimate(self.fn, *args, target=self.chip, **self.options)
            except DoesNotFit:
                self.peaks[size] = REFUSED
            else:
                self.peaks[size], self.seconds[size] = report.peak_bytes, report.seconds
        return self.peaks[size]


def _largest(
    tried: _Tried, room: int, multiple_of: int, limit: int, progress: bool
) -> BatchSize:
    peak = lambda units: tried(units * multiple_of)
    search = BatchSearch(peak, room, limit // multiple_of)
    with spinner(progress, f"largest batch in {format_bytes(room)}") as show:
        for units in search.steps():
            show(f"compiling batch {units * multiple_of}")
            search.measure(units)
    size = search.fits * multiple_of
    return BatchSize(size, search.fits == search.limit, tried.seconds.get(size))


def _round(largest: int, multiple_of: int) -> Iterator[int]:
    """Sizes up to a quarter of the largest that large powers of two divide."""
    for share in (1.0, 0.75, 0.5, 0.25):
        for power in (8, 64):
            step = math.lcm(multiple_of, power)
            size = int(share * largest) // step * step
            if size:
                yield size


def _checked(
    fn, make_args, target, memory, multiple_of, limit, progress
) -> tuple[Target, int]:
    """The chip, and the bytes that there are."""
    chip = get_target(target)
    room = _room(chip, memory)
    check_callable("fn", fn)
    check_callable("make_args", make_args, "a function of a batch size")
    check_bool("progress", progress)
    multiple_of = check_int("multiple_of", multiple_of, 1)
    if check_int("limit", limit, 1) < multiple_of:
        raise ValueError(
            f"multiple_of={multiple_of}, limit={limit}: need 1 <= multiple_of <= limit"
        )
    return chip, room


def _room(chip: Target, memory: int | str | None) -> int:
    room = chip.memory_bytes if memory is None else parse_bytes(memory, "memory")
    if room is None:
        raise ValueError(
            f"the memory of target {chip.name!r} is not known: pass "
            "memory=, in bytes or as text like '14GiB'"
        )
    if room <= 0:
        raise ValueError(f"memory={memory!r}: must be more than 0")
    return room
