"""Bytes of weights, gradients and optimizer state, as a table and a picture."""

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

from jaxmem._bytes import format_bytes
from jaxmem._checks import wrong_value
from jaxmem.optim.ledgers.plot import plot_ledger
from jaxmem.optim.ledgers.row import PARTS, LedgerRow
from jaxmem.pages import PlainResult, aligned, rich_table


@dataclass(frozen=True)
class Ledger(PlainResult):
    """Bytes of weights, gradients, and optimizer state; prints as a table.

    Attributes:
      parameters: the number of trained parameters, of all devices.
      rows: what takes bytes, in the order of `LedgerRow.part`.
    """

    parameters: int
    rows: tuple[LedgerRow, ...]

    @property
    def device_bytes(self) -> int:
        """Bytes on one device, all rows together."""
        return sum(row.device_bytes for row in self.rows)

    @property
    def host_bytes(self) -> int:
        """Bytes in the host's memory, for one device."""
        return sum(row.host_bytes for row in self.rows)

    def bytes_of(self, part: str) -> int:
        """Bytes on one device of "weights", "gradients", "accumulator", "moments" or
        "masters".
        """
        if part not in PARTS:
            raise wrong_value("part", part, f"one of {', '.join(PARTS)}")
        return sum(row.device_bytes for row in self.rows if row.part == part)

    def per_parameter(self, count: int) -> float:
        """Bytes a parameter, of a number of bytes."""
        return count / max(self.parameters, 1)

    def table(self) -> Any:
        """The ledger as a `rich` table."""
        return self.__rich__()

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws bytes a parameter, one bar on the device and one on the host.

        Args:
          path: where the picture goes, as matplotlib takes it: `"ledger.png"`.

        Raises:
          ImportError: matplotlib is missing (extra `plot`).
        """
        plot_ledger(self.parameters, self.rows, path)

    def __str__(self) -> str:
        return "\n".join(aligned([_HEAD, *self._cells()]))

    def __rich__(self) -> Any:
        return rich_table(_HEAD, self._cells(), f"{self.parameters:,} parameters")

    def _on_page(self, page: Any) -> tuple[Any, ...]:
        host = f", {format_bytes(self.host_bytes)} on the host"
        sizes = format_bytes(self.device_bytes) + (host if self.host_bytes else "")
        headline = f"{self.parameters:,} parameters: {sizes} on a device"
        table = page.table(_HEAD, self._cells(), numbers=[3, 4, 5, 6])
        return headline, None, table

    def _cells(self) -> Iterator[tuple[str, ...]]:
        for row in self.rows:
            yield (row.part, row.name, ", ".join(row.dtypes), *self._sizes(row))
        yield ("total", "", "", *self._sizes(self))

    def _sizes(self, of: "LedgerRow | Ledger") -> tuple[str, ...]:
        each = self.per_parameter(of.device_bytes), self.per_parameter(of.host_bytes)
        return (
            format_bytes(of.device_bytes),
            f"{each[0]:.2f}",
            format_bytes(of.host_bytes) if of.host_bytes else "",
            f"{each[1]:.2f}" if of.host_bytes else "",
        )


_HEAD = ("part", "what", "dtype", "device", "B/param", "host", "B/param")
