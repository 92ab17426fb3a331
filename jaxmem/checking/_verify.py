"""`verify`: a scheduled step is checked where it is first called."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxmem.checking._check import compared
from jaxmem.checking._compare import StepComparison
from jaxmem.checking._report import CheckReport
from jaxmem.checking._room import is_out_of_memory, needed_bytes, room, slices
from jaxmem.checking._runs import Arguments

_LOGGER = logging.getLogger("jaxmem")
_STEPS = 2  # the second with the state that the first one leaves


class VerifyError(RuntimeError):
    """A scheduled step gives different results from the original step.

    Attributes:
      report: the `CheckReport`; its `write_script` writes what reproduces it.
    """

    def __init__(self, message: str, report: CheckReport):
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple:
        return VerifyError, (str(self), self.report)


def verify(
    step: Callable,
    reference: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    static: Sequence[int | str] = (),
) -> CheckReport | None:
    """Checks a step beside its reference, on a slice of the batch if it must be.

    Args:
      step: the scheduled step.
      reference: the original step.
      args: arguments, which stay as they are.
      kwargs: keyword arguments, likewise.
      static: places of those that are Python values.

    Returns:
      The report; None where nothing could be verified, which a warning says.

    Raises:
      VerifyError: a result differs.
    """
    name = getattr(reference, "__name__", "the step")
    why = "the original step does not fit the device"
    for note, comparison in _that_fit(reference, (args, dict(kwargs)), static):
        try:
            report = compared(step, comparison, [note] if note else [])
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            continue
        except (TypeError, ValueError) as error:
            if not note:
                raise
            # the step, or the schedule, is for the whole batch alone
            why = f"{why}, and {note} it fails: {error}"
            break
        if not report.passed:
            raise VerifyError(f"schedule(verify=True): {report}", report)
        less_exact = any(leaf.rounding is not None for leaf in report.leaves)
        level = logging.WARNING if less_exact else logging.INFO
        _LOGGER.log(level, "schedule(verify=True): %s", report)
        return report
    warnings.warn(f"{name} was not verified: {why}", stacklevel=4)
    return None


def _that_fit(
    reference: Callable, arguments: Arguments, static: Sequence[int | str]
) -> Iterator[tuple[str, StepComparison]]:
    """(sentence, comparison) of the whole batch, then of ever smaller slices of it."""
    limit = room()

    def fits(comparison: StepComparison) -> bool:
        needed = needed_bytes(comparison.runner, comparison.arguments)
        return not limit or needed <= limit

    whole = StepComparison(reference, arguments, static, _STEPS)
    if fits(whole):
        yield "", whole
    for size, examples, some in slices(reference, arguments, static):
        part = StepComparison(reference, some, static, _STEPS)
        if fits(part):
            yield f"on the first {size} examples of {examples}", part
