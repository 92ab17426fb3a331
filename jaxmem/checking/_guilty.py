"""Which passes of a scheduled step make the difference: switched off one by one."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxmem.checking._runs import Arguments, copied

_NOT_THE_PASSES = (
    "with every pass switched off the scheduled step differs as well: no pass makes "
    "the difference"
)


class Rewritable(Protocol):
    """A scheduled step, as far as it is asked here."""

    def applied_passes(self, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Names of the passes that change the step, in their order."""
        ...

    def settled(
        self, *args: Any, without: Sequence[str] = (), **kwargs: Any
    ) -> Callable:
        """The step with the choice that is found already, and without some passes."""
        ...


def rewritable(step: Any) -> Rewritable | None:
    """The step, if it is a scheduled one; else None."""
    known = hasattr(step, "settled") and hasattr(step, "applied_passes")
    return step if known else None


def guilty_passes(
    step: Rewritable, arguments: Arguments, differs: Callable[[Callable], bool]
) -> tuple[tuple[str, ...], str]:
    """(names of the passes, a sentence where none can be named).

    Args:
      step: a scheduled step that differs.
      arguments: of its call.
      differs: whether a step differs.
    """
    args, kwargs = copied(arguments)
    names = step.applied_passes(*args, **kwargs)

    def differs_without(off: Sequence[str]) -> bool:
        args, kwargs = copied(arguments)
        try:
            return differs(step.settled(*args, without=off, **kwargs))
        except Exception:  # a pass that another one needs
            return False

    if not names:
        return (), "no pass has changed the scheduled step"
    if differs_without(names):
        return (), _NOT_THE_PASSES
    off: list[str] = []
    for name in reversed(names):  # of the last first: what comes before stands
        if differs_without([*off, name]):
            off.append(name)
    return tuple(name for name in names if name not in off), ""
