"""How much of a report's bytes a TPU's tiles fill up, as a column and in one line."""

from jaxmem._bytes import format_bytes
from jaxmem.memory.report.data import ReportData
from jaxmem.memory.report.groups import BufferRow

_LEAST = 1e-3  # of the peak: less has no line
_RATIO = 1.005  # padded over unpadded: less would be printed as 1


def padded_cell(row: BufferRow) -> str:
    """`3.01 MiB padded 64x`; empty where tiles add very little."""
    unpadded = row.bytes - row.padding
    if not row.array or row.bytes < _RATIO * unpadded:
        return ""
    return f"{format_bytes(unpadded)} padded {_times(row.bytes / unpadded)}"


def padding_lines(report: ReportData) -> list[str]:
    """How much of the peak is padding; nothing where very little is."""
    size, peak = sum(b.padding for b in report.at_peak), report.peak_bytes
    if not size or size < _LEAST * peak:
        return []
    return [f"of the peak {format_bytes(size)} ({100 * size / peak:.1f} %) is padding"]


def _times(ratio: float) -> str:
    return f"{ratio:.3g}x" if ratio < 1000 else f"{ratio:.0f}x"
