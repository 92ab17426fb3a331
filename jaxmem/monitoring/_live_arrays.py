"""What `live_arrays` returns: rows of plain data, which keep no array alive."""

from dataclasses import dataclass, field, replace
from typing import Any

from jaxmem._bytes import format_bytes
from jaxmem._checks import check_int, wrong_type
from jaxmem.monitoring._live_array import LiveArray
from jaxmem.monitoring._text import HEAD, as_rich, as_text, cells_of
from jaxmem.pages import PlainResult


class _Rows(PlainResult):
    """What lists of live arrays have in common."""

    rows: tuple[LiveArray, ...]

    def text(self, columns: int = 80) -> str:
        """What `print` shows, in lines of so many characters.

        Args:
          columns: at least 40.

        Raises:
          TypeError: `columns` is no int.
          ValueError: it is less than 40.
        """
        columns = check_int("columns", columns, 40)
        return as_text(self._headline(), self.rows, self._notes(), columns)

    def __str__(self) -> str:
        return self.text()

    def __rich__(self) -> Any:
        return as_rich(self._headline(), self.rows, self._notes())

    def _on_page(self, page: Any) -> tuple[Any, ...]:
        table = page.table(HEAD, map(cells_of, self.rows), numbers=[0])
        return self._headline(), None, table, page.lines("Notes", self._notes())

    def _headline(self) -> str:
        raise NotImplementedError

    def _notes(self) -> list[str]:
        return []


@dataclass(frozen=True)
class LiveArrays(_Rows):
    """What `jaxmem.live_arrays` returns; prints as text, and as a table.

    Attributes:
      rows: the largest first.
      devices: bytes of each device of this process that has any.
      other_bytes: by memory, the bytes that are not the devices' own: in the host's
        memory, or of another backend.
    """

    rows: tuple[LiveArray, ...]
    devices: dict[str, int] = field(default_factory=dict)
    other_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """In the memory of this process's devices together."""
        return sum(self.devices.values())

    @property
    def device_bytes(self) -> int:
        """On the device that has most."""
        return max(self.devices.values(), default=0)

    @property
    def count(self) -> int:
        """How many arrays have a buffer of their own."""
        return sum(row.count for row in self.rows if not row.shares)

    def since(self, before: "LiveArrays") -> "LiveArraysChange":
        """What is alive now and was not, and what is gone.

        Args:
          before: what `jaxmem.live_arrays` has returned earlier, with the same names.

        Returns:
          A `LiveArraysChange`, which is `after - before` as well.

        Raises:
          TypeError: `before` is no `LiveArrays`.
        """
        if not isinstance(before, LiveArrays):
            raise wrong_type("before", before, "what jaxmem.live_arrays has returned")
        then = {row.identity: row for row in before.rows if not row.shares}
        now = {row.identity: row for row in self.rows if not row.shares}
        rows = [_change(then.get(key), now.get(key)) for key in {**now, **then}]
        changed = [row for row in rows if row.count or row.bytes]
        changed.sort(key=lambda row: (-abs(row.bytes), row.identity))
        total = self.total_bytes - before.total_bytes
        return LiveArraysChange(tuple(changed), total)

    def __sub__(self, before: "LiveArrays") -> "LiveArraysChange":
        return self.since(before)

    def _headline(self) -> str:
        size, devices = format_bytes(self.device_bytes), len(self.devices)
        arrays = f"{self.count} array{'' if self.count == 1 else 's'}"
        where = f"on {next(iter(self.devices), 'no device')}"
        if devices > 1:
            where = f"on the fullest of {devices} devices"
        return f"live arrays: {size} {where}, {arrays}"

    def _notes(self) -> list[str]:
        notes = [f"{format_bytes(b)} in {m}" for m, b in self.other_bytes.items()]
        if len(self.devices) > 1:
            total = format_bytes(self.total_bytes)
            notes.append(f"{total} on all devices of this process, as in the rows")
        return [*notes, *_deleted(self.rows), *_shared(self.rows)]


@dataclass(frozen=True)
class LiveArraysChange(_Rows):
    """What `after.since(before)` returns: what was not alive before, and what is gone.

    Attributes:
      rows: what has changed most first; counts and bytes are differences, which are
        negative where arrays are gone.
      total_bytes: the difference in the memory of this process's devices together.
    """

    rows: tuple[LiveArray, ...]
    total_bytes: int = 0

    @property
    def count(self) -> int:
        """How many arrays more there are."""
        return sum(row.count for row in self.rows)

    def _headline(self) -> str:
        if not self.rows:
            return "live arrays: no change"
        more = "more" if self.total_bytes >= 0 else "less"
        arrays = f"{self.count:+d} array{'' if abs(self.count) == 1 else 's'}"
        return f"live arrays: {format_bytes(abs(self.total_bytes))} {more}, {arrays}"


def _change(before: LiveArray | None, after: LiveArray | None) -> LiveArray:
    row = after or before
    assert row is not None
    none = replace(row, count=0, bytes=0, device_bytes=0)
    then, now = before or none, after or none
    return replace(
        row,
        count=now.count - then.count,
        bytes=now.bytes - then.bytes,
        device_bytes=now.device_bytes - then.device_bytes,
        deleted=0,
    )


def _deleted(rows: tuple[LiveArray, ...]) -> list[str]:
    """By tree, what its name still stands for and is gone."""
    notes = []
    for name in dict.fromkeys(row.name for row in rows if row.deleted):
        gone = [row for row in rows if row.name == name and row.deleted]
        of = sum(row.name == name for row in rows)
        example = f", {gone[0].path}" if gone[0].path else ""
        words = "was" if len(gone) == 1 else "were"
        notes.append(f"{name}: {len(gone)} of {of} {words} donated or deleted{example}")
    return notes


def _shared(rows: tuple[LiveArray, ...]) -> list[str]:
    return [f"{r.place} has the buffer of {r.shares}" for r in rows if r.shares]
