"""`explain`: an error of memory that has run out, in words, and what to write."""

from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from typing import Any

from jaxmem._bytes import format_bytes
from jaxmem._checks import check_callable, wrong_value
from jaxmem.chips import Target, get_target
from jaxmem.explaining._advice import advise_on
from jaxmem.explaining._diagnosis import diagnose, reason
from jaxmem.explaining._estimated import (
    compared,
    diagnosed_again,
    estimated,
    with_report,
)
from jaxmem.explaining._explanation import Explanation
from jaxmem.explaining._facts import Facts
from jaxmem.explaining._forms import LOOKED_FOR, facts_of
from jaxmem.explaining._text import line_of_user, text_of
from jaxmem.monitoring import live_arrays

_WITHOUT_ARRAYS = "kernel", "start", "host"  # stages that arrays on a device are not of


def explain(
    error: BaseException | str | PathLike[str],
    step: Callable | None = None,
    *args: Any,
    target: str | Target | None = None,
    **options: Any,
) -> Explanation:
    """Explains an out-of-memory error of XLA: what is large, why, and what to do.

    It reads the errors and logs of GPUs, TPUs and the host: what the compiler says, the
    dump of the allocator, failed reservations, libraries without room. Where a log has
    several errors, the last is explained. The figures are those of the log; with a step
    they are compared with what the step takes, by module and line.

    Args:
      error: an exception, whose causes are read as well; the text of a log; or the path
        of one.
      step: the step that was running, to be compiled; None reads the log alone.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`.
      target: the chip that it was running on, of `jaxmem.targets()`. Without a step its
        memory alone is used. A step is compiled for "cpu" by default.
      **options: with a step, of `jaxmem.estimate`: `donate_argnums` and the like, and
        the step's keyword arguments.

    Returns:
      An `Explanation`.

    Raises:
      TypeError: `error` is neither an exception nor a text nor a path; what
        `jaxmem.estimate` raises for the step.
      ValueError: there is no such error in it; an unknown target; a path that cannot be
        read.

    Example::

      log = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9.25GiB."
      print(jaxmem.explain(log, target="l4"))
    """
    text = text_of(error)
    chip = None if target is None else get_target(target, check=False)
    if step is not None:
        check_callable("step", step)
    elif options:
        allowed = "options of jaxmem.estimate, which need a step"
        raise wrong_value("options", options, allowed)
    facts = facts_of(text)
    if facts is None:
        allowed = f"it contains no out-of-memory error; looked for were {LOOKED_FOR}"
        raise wrong_value("error", error, allowed)
    if chip is not None:
        facts = replace(facts, chip=chip.name, chip_bytes=chip.memory_bytes)
    if facts.limit is None and facts.device in ("GPU", "TPU"):
        memory = facts.chip_bytes
        facts = replace(facts, limit=memory, of_chip=memory is not None)
    diagnosis, notes = diagnose(facts), _alive(error, facts)
    if step is not None:
        report = estimated(step, args, target, options)
        facts = with_report(facts, report)
        diagnosis = diagnosed_again(diagnosis, facts)
        notes = (
            *notes,
            compared(facts, report),
            *map("Of the step: {}.".format, report.advice),
        )
    return Explanation(
        facts.stage,
        facts.device,
        diagnosis,
        reason(diagnosis, facts),
        facts.program,
        line_of_user(text),
        facts.requested,
        facts.needed,
        facts.limit,
        facts.in_use,
        facts.free,
        facts.largest_free,
        facts.largest,
        advise_on(diagnosis, facts),
        notes,
    )


def _alive(error: Any, facts: Facts) -> tuple[str, ...]:
    """What is alive in the process that has caught an error; a log is of another."""
    if not isinstance(error, BaseException) or facts.stage in _WITHOUT_ARRAYS:
        return ()
    try:
        alive = live_arrays()
    except RuntimeError:  # of a backend that has not begun
        return ()
    if not alive.total_bytes:
        return ()
    size = format_bytes(alive.device_bytes)
    return (
        f"Alive in this process now: {size} on a device, in {alive.count} arrays. "
        "jaxmem.live_arrays(state=state) tells which",
    )


def has_error(text: str) -> bool:
    """Whether a text has an error that `explain` knows."""
    return facts_of(text) is not None
