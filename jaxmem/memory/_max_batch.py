"""The largest batch whose step fits."""

from collections.abc import Callable
from typing import Any

from jaxmem._bytes import format_bytes, parse_bytes
from jaxmem._checks import check_bool, check_callable, check_int
from jaxmem._progress import spinner
from jaxmem.chips import Target, get_target
from jaxmem.memory._batch_search import REFUSED, BatchSearch
from jaxmem.memory._estimate import estimate
from jaxmem.memory.compile.answer import DoesNotFit


class LargestBatch(int):
    """A batch size, as `jaxmem.max_batch` found it: an `int` that prints the limit.

    Attributes:
      at_limit: whether it is the largest size that `limit` and `multiple_of` allow, so
        that larger ones were not tried.
    """

    at_limit: bool

    def __new__(cls, size: int, at_limit: bool) -> "LargestBatch":
        found = super().__new__(cls, size)
        found.at_limit = at_limit
        return found

    def __repr__(self) -> str:
        told = " (the limit: larger ones were not tried)" if self.at_limit else ""
        return f"{int(self)}{told}"

    def __reduce__(self) -> tuple[type, tuple[int, bool]]:
        return LargestBatch, (int(self), self.at_limit)


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
) -> LargestBatch:
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
      and a quarter more: peaks do not always rise with the batch, so one in between
      may. `.at_limit` tells whether `limit` has ended the search; so does its text.

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
            return REFUSED

    search = BatchSearch(peak, room, limit // multiple_of)
    with spinner(progress, f"largest batch in {format_bytes(room)}") as show:
        for units in search.steps():
            show(f"compiling batch {units * multiple_of}")
            search.measure(units)
    return LargestBatch(search.fits * multiple_of, search.fits == search.limit)


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
