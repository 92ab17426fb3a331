"""What a step may take: bytes, predicted milliseconds, a growth over a baseline."""

from collections.abc import Iterator

from jaxmem._bytes import format_bytes, parse_bytes
from jaxmem._checks import check_float
from jaxmem.memory import MemoryReport


def exceeded(
    report: MemoryReport,
    baseline: MemoryReport | None = None,
    *,
    max_bytes: int | str | None = None,
    max_ms: float | None = None,
    max_growth: float | None = None,
) -> tuple[str, ...]:
    """A sentence for each limit that a step is above.

    Args:
      report: of the step.
      baseline: an older report of it.
      max_bytes: limit for the peak, in bytes or as text such as "14GiB".
      max_ms: limit for the predicted milliseconds.
      max_growth: limit for the growth of both over the baseline, as a share: 0.01 is
        one per cent.

    Raises:
      ValueError: no seconds are predicted for the chip, and `max_ms` asks for them.
    """
    limit = check_limits(max_bytes, max_ms, max_growth)
    if max_ms is not None and report.seconds is None:
        raise ValueError(
            f"max_ms={max_ms!r}: no seconds are predicted for {report.target}"
        )
    found = [*_over(report, limit, max_ms)]
    if baseline is not None and max_growth is not None:
        found += _grown(report, baseline, max_growth)
    return tuple(found)


def check_limits(
    max_bytes: int | str | None, max_ms: float | None, max_growth: float | None
) -> int | None:
    """The limit in bytes; an error names a limit that is none."""
    if max_ms is not None:
        check_float("max_ms", max_ms, above=0)
    if max_growth is not None:
        check_float("max_growth", max_growth, at_least=0)
    return None if max_bytes is None else parse_bytes(max_bytes, "max_bytes")


def _over(
    report: MemoryReport, limit: int | None, max_ms: float | None
) -> Iterator[str]:
    if limit is not None and report.peak_bytes > limit:
        peak, limited = map(format_bytes, (report.peak_bytes, limit))
        yield f"the peak takes {peak}, more than {limited}"
    if max_ms is not None and 1e3 * (report.seconds or 0) > max_ms:
        ms = f"{1e3 * (report.seconds or 0):.4g}"
        yield f"a step is predicted to take {ms} ms, more than {max_ms:g} ms"


def _grown(report: MemoryReport, baseline: MemoryReport, most: float) -> Iterator[str]:
    both = {
        "the peak": (baseline.peak_bytes, report.peak_bytes),
        "the predicted time": (baseline.seconds, report.seconds),
    }
    for what, (before, after) in both.items():
        if before and after is not None and after > before * (1 + most):
            grown = 100 * (after / before - 1)
            yield f"{what} has grown by {grown:.3g} %, more than {100 * most:g} %"
