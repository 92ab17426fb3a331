"""What `explain` returns, and how it is printed."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxmem._bytes import format_bytes
from jaxmem.explaining._advice import LineToWrite
from jaxmem.explaining._diagnosis import Diagnosis
from jaxmem.explaining._facts import Device, LargeBuffer, Stage
from jaxmem.pages import PlainResult

_WIDTH = 80
_SHOWN = 8  # buffers
_STAGES: dict[Stage, str] = {
    "compile": "does not compile for a {}",
    "load": "does not load on a {}",
    "run": "out of memory on a {}",
    "start": "out of memory at startup on a {}",
    "kernel": "a kernel does not compile for a {}",
    "library": "a library fails on a {}",
    "host": "out of memory on the {}",
}


@dataclass(frozen=True)
class Explanation(PlainResult):
    """What `jaxmem.explain` returns; prints as text, and as a table.

    Bytes are None where neither the log nor an estimate has them.

    Attributes:
      stage: what failed: "compile", "load" (of a program), "run", "start" (JAX's
        reservation), "kernel", "library" or "host".
      device: whose memory it is: "GPU", "TPU", "CPU" or "host".
      diagnosis: the cause, in one or two words: "true peak", "padding", "constants",
        "fragmentation", "live arrays", "another process", "pool limit", "no room for
        libraries", "autotuning", "kernel memory", "host memory", or "unknown".
      reason: the cause, in a sentence.
      program: the function that was compiled; "" where it is not told.
      line: the innermost line of a traceback outside installed libraries.
      requested_bytes: what could not be allocated.
      needed_bytes: what the program takes.
      limit_bytes: what there is, for the program or for the allocator.
      in_use_bytes: what was allocated when it failed.
      free_bytes: what was not.
      largest_free_bytes: the largest piece of that.
      largest: the buffers that are listed, or those of the step, the largest first.
      advice: what to write, what helps most first.
      notes: how the step's own figures compare, and the like.
    """

    stage: Stage
    device: Device
    diagnosis: Diagnosis
    reason: str
    program: str = ""
    line: str = ""
    requested_bytes: int | None = None
    needed_bytes: int | None = None
    limit_bytes: int | None = None
    in_use_bytes: int | None = None
    free_bytes: int | None = None
    largest_free_bytes: int | None = None
    largest: tuple[LargeBuffer, ...] = ()
    advice: tuple[LineToWrite, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*_wrapped(self._headline()), *self._lines()])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.padding import Padding
        from rich.text import Text

        blocks: list[Any] = [Text(self._headline(), style="bold red")]
        blocks += [Text(line, style="dim") for line in self._sizes()]
        blocks += [Text(f"\n{self.reason[:1].upper()}{self.reason[1:]}.")]
        if self.largest:
            blocks += [Text("\nLargest:", style="bold"), self._table()]
        if self.advice:
            blocks.append(Text("\nWhat to write:", style="bold"))
        for each in self.advice:
            code = Padding(Text(each.line, style="cyan"), (0, 0, 0, 4))
            blocks += [Padding(Text(each.why), (0, 0, 0, 2)), code]
        blocks += [Text(f"\n{note}", style="dim") for note in self.notes]
        return Group(*blocks)

    def _on_page(self, page: Any) -> tuple[Any, ...]:
        head = "bytes", "array", "where"
        told = [*self._sizes(), *self.notes]
        return (
            *(self._headline(), False),
            page.lines("Why", [f"{self.reason}.", *told]),
            page.table(head, self._rows(), numbers=[0]) if self.largest else "",
            page.table(("what to do", "line"), [(a.why, a.line) for a in self.advice]),
        )

    def _headline(self) -> str:
        failed = _STAGES[self.stage].format(self.device)
        where = f" ({self.line})" if self.line else ""
        return f"{self.program or 'a program'}{where}: {failed}: {self.diagnosis}"

    def _lines(self) -> Iterator[str]:
        yield from _wrapped("; ".join(self._sizes()), "  ")
        yield ""
        yield from _wrapped(f"{self.reason[:1].upper()}{self.reason[1:]}.")
        if self.largest:
            yield from ("", "Largest:")
        for row in self._rows():
            yield from _wrapped("  ".join(filter(None, row[1:])), f"{row[0]:>10}  ", 12)
        if self.advice:
            yield from ("", "What to write:")
        for each in self.advice:
            yield from _wrapped(each.why, "  - ", 4)
            yield from textwrap.indent(each.line, "      ").splitlines()
        for note in self.notes:
            yield ""
            yield from _wrapped(note)

    def _sizes(self) -> list[str]:
        needed, limit = self.needed_bytes, self.limit_bytes
        named = {
            "needed": needed,
            "asked for": self.requested_bytes,
            "limit": limit,
            "in use": self.in_use_bytes,
            "free": self.free_bytes,
            "largest free piece": self.largest_free_bytes,
        }
        lines = [
            f"{k} {format_bytes(size)}" for k, size in named.items() if size is not None
        ]
        if needed is not None and limit is not None and needed > limit:
            lines.append(f"too much {format_bytes(needed - limit)}")
        return lines

    def _rows(self) -> list[tuple[str, str, str]]:
        """Bytes, array and place of the largest buffers."""
        return [
            (format_bytes(b.bytes), _array(b), _place(b)) for b in self.largest[:_SHOWN]
        ]

    def _table(self) -> Any:
        from rich.markup import escape
        from rich.table import Table

        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_column(overflow="fold", style="dim")
        for row in self._rows():
            table.add_row(*map(escape, row))
        return table


def _array(buffer: LargeBuffer) -> str:
    if not buffer.array:
        size = format_bytes(buffer.bytes / buffer.count)
        return f"{buffer.count} chunks of {size}" if buffer.count > 1 else "1 chunk"
    times = f"{buffer.count} x " if buffer.count > 1 else ""
    padding = ""
    if buffer.padding_bytes:
        padding = f" ({format_bytes(buffer.padding_bytes)} of padding)"
    return f"{times}{buffer.array}{padding}"


def _place(buffer: LargeBuffer) -> str:
    named = (buffer.operation, buffer.module, buffer.source)
    return ", ".join(part for part in named if part)


def _wrapped(text: str, first: str = "", indent: int | None = None) -> list[str]:
    rest = " " * (len(first) if indent is None else indent)
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
