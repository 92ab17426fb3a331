"""The step as it was given and as it is scheduled, compiled alike."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxmem.memory import DoesNotFit, MemoryReport, Pending


@dataclass(frozen=True)
class Compared:
    """Two reports, with None where the compiler refuses: it does not fit the chip."""

    plain: MemoryReport | None
    scheduled: MemoryReport | None


def compared(
    plain: Callable[..., Pending],
    scheduled: Callable[..., Pending],
    known: MemoryReport | None = None,
    products: int | None = None,
) -> Compared:
    """Compiles both, or one where the other is known, with the same options.

    Args:
      plain: starts the compile of the step as it was given; takes `products`.
      scheduled: the same of the step as it is scheduled.
      known: the report of the scheduled step.
      products: the option it was compiled with, see `jaxmem.memory.Pending`.
    """
    while True:
        begun = [plain(products=products)]
        begun += [scheduled(products=products)] if known is None else []
        reports = [_report(one) for one in begun]
        needed = max((one.products or 0 for one in begun), default=0) or None
        if needed == products:
            return Compared(reports[0], known if known is not None else reports[1])
        products, known = needed, None  # what one needs, both get


def _report(pending: Pending) -> MemoryReport | None:
    try:
        return pending.result()
    except DoesNotFit:
        return None
