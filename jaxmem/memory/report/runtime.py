"""What a device has measured, beside the estimate of a report."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxmem._bytes import format_bytes
from jaxmem._checks import wrong_type
from jaxmem.memory.report.data import ReportData
from jaxmem.pages import PlainResult, aligned, rich_table

_HEAD = ("", "bytes", "what it says")


@dataclass(frozen=True)
class RuntimeMemory(PlainResult):
    """What `report.runtime()` returns; prints as a table.

    The device's figures are those of its allocator, in bytes, for everything that this
    process has run since it started: measure in a process that runs the step alone.
    They are None where the device keeps no statistics, as the CPU does not.

    Attributes:
        name: the step's name.
        target: the chip that the estimate is for.
        device: the device that was asked.
        estimated_bytes: the report's peak.
        peak_bytes_in_use: the most bytes that were allocated at one time.
        bytes_in_use: what is allocated now.
        bytes_limit: what the allocator may take of the device's memory.
        pool_bytes: what it has taken of it so far.
        largest_free_block_bytes: the largest array that the allocator can place now
            without taking more.
    """

    name: str
    target: str
    device: str
    estimated_bytes: int
    peak_bytes_in_use: int | None = None
    bytes_in_use: int | None = None
    bytes_limit: int | None = None
    pool_bytes: int | None = None
    largest_free_block_bytes: int | None = None

    @property
    def measured(self) -> bool:
        """Whether the device keeps statistics."""
        return self.peak_bytes_in_use is not None

    @property
    def difference(self) -> int | None:
        """Measured peak less the estimate, in bytes."""
        if self.peak_bytes_in_use is None:
            return None
        return self.peak_bytes_in_use - self.estimated_bytes

    @property
    def fragmentation(self) -> float | None:
        """The part of the free memory that is not in the largest free block, 0 to 1."""
        return fragmentation(
            self.pool_bytes or self.bytes_limit,
            self.bytes_in_use,
            self.largest_free_block_bytes,
        )

    def __str__(self) -> str:
        lines = [f"  {line}" for line in aligned([*self._rows()], numbers=[1])]
        return "\n".join([self._headline(), *lines])

    def __rich__(self) -> Any:
        return rich_table(_HEAD, self._rows(), self._headline(), box=None)

    def _on_page(self, page: Any) -> tuple[Any, ...]:
        return self._headline(), None, page.table(_HEAD, self._rows(), numbers=[1])

    def _headline(self) -> str:
        return f"{self.name}: the estimate for {self.target}, and {self.device}"

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        yield "peak, estimated", format_bytes(self.estimated_bytes), "by the compiler"
        if self.peak_bytes_in_use is None or self.difference is None:
            why = f"{self.device} keeps no memory statistics"
            yield "peak, measured", "absent", why
            return
        share = 100 * self.difference / max(self.estimated_bytes, 1)
        sign = "+" if self.difference >= 0 else ""
        change = f"{sign}{format_bytes(self.difference)} ({share:+.1f} %)"
        size = format_bytes(self.peak_bytes_in_use)
        yield "peak, measured", size, f"{change}; all that this process has run counts"
        for name, count, why in (
            ("in use now", self.bytes_in_use, ""),
            ("limit", self.bytes_limit, "what the allocator may take"),
            (
                "taken so far",
                self.pool_bytes,
                "of the device by the allocator",
            ),
            ("largest free block", self.largest_free_block_bytes, self._free()),
        ):
            if count is not None:
                yield name, format_bytes(count), why

    def _free(self) -> str:
        part = self.fragmentation
        if part is None:
            return ""
        return f"{100 * part:.1f} % of what is free lies in smaller blocks"


def fragmentation(
    held: int | None, in_use: int | None, largest_free: int | None
) -> float | None:
    """The part of the free memory that is not in the largest free block, 0 to 1."""
    if held is None or in_use is None or largest_free is None:
        return None
    free = held - in_use
    return max(1 - largest_free / free, 0.0) if free > 0 else 0.0


def runtime_of(report: ReportData, device: Any = None) -> RuntimeMemory:
    """The figures of a device; of the first local one by default."""
    if device is None:
        import jax

        device = jax.local_devices()[0]
    if not callable(getattr(device, "memory_stats", None)):
        raise wrong_type("device", device, "a jax.Device, as jax.devices() lists them")
    stats = device.memory_stats() or {}
    names = [f.name for f in dataclasses.fields(RuntimeMemory) if f.default is None]
    kind = getattr(device, "device_kind", "")
    named = str(device) if kind in ("", str(device)) else f"{device} ({kind})"
    figures = {n: int(stats[n]) for n in names if n in stats}
    return RuntimeMemory(
        report.name, report.target, named, report.peak_bytes, **figures
    )
