"""What `estimate` returns: the bytes of a compiled step, and the buffers they are in.

The numbers are the compiler's own. The rows come from its buffer assignment and always
add up to the peak: bytes that cannot be attributed are a row of their own.
"""

import dataclasses
import json
import re
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from jaxmem._bytes import parse_bytes
from jaxmem._checks import from_plain, wrong_type
from jaxmem.ir.host_slices import COPIES
from jaxmem.memory.buffers import (
    Collective,
    CompiledOperation,
    WrongSlice,
    collectives_of,
    compiled_operations,
    parse_hlo,
    sent_bytes,
    wrong_slices,
)
from jaxmem.memory.buffers.attribute import attribute
from jaxmem.memory.compile.facts import StepFacts
from jaxmem.memory.report.advice import LateAdvice
from jaxmem.memory.report.data import ReportData
from jaxmem.memory.report.donation import Donations
from jaxmem.memory.report.misread import about_wrong_slices
from jaxmem.memory.time.result import StepTime
from jaxmem.memory.time.step_time import step_time

if TYPE_CHECKING:
    from jaxmem.memory.report.compare import ReportComparison
    from jaxmem.memory.report.runtime import RuntimeMemory

_SIZES = ("argument", "output", "temp", "alias", "generated_code")
# made without the rows: a search reads them alone
_FROM_HLO = "collectives", "wrong_slices", "time", "instructions"
_ROWS = "at_peak", "peak_step", "timeline", "notes", "placed"


@dataclass(frozen=True)
class MemoryReport(ReportData):
    """The bytes that a step takes on a target, and the buffers alive at the peak.

    Sizes are bytes on one device, as the target's compiler assigned them. A report
    prints as text, and as a table with a picture in a notebook.

    Attributes:
        target: the chip compiled for.
        memory_bytes: the chip's memory, None where unknown (cpu).
        name: the step's name.
        peak_bytes: `argument_bytes + output_bytes + temp_bytes - alias_bytes`.
        argument_bytes: parameters, optimizer state, batch.
        output_bytes: what the step returns, donated buffers included.
        temp_bytes: everything else, above all residuals.
        alias_bytes: outputs that reuse the buffers of donated arguments.
        generated_code_bytes: the program itself; not part of the peak.
        host_bytes: what the step takes of the host's memory: arguments, outputs and
            temporaries in `pinned_host`, less those that are donated.
        cost: `"flops"` and `"bytes accessed"` where the compiler counts them.
        at_peak: the buffers alive at the peak, largest first. Each buffer of at least a
            thousandth of the peak has a row; the rows add up to `peak_bytes`.
        peak_step: the step of the schedule at which the temporaries are fullest.
        timeline: live bytes at about 200 steps of the schedule, with the peak.
        notes: donated buffers that were not reused, arguments that are in memory
            twice, and the like.
        advice: what takes less, with the bytes that are expected of it: what
            `jaxmem.substitute` finds in the step, and what the passes of
            `jaxmem.schedule` make of it. They are asked when it is first read, and
            nothing is compiled.
        placed: the temporaries of at least a thousandth of the peak, a thousand at
            most, with their places in memory and their live ranges.
        collectives: what devices send each other, what sends most first.
        wrong_slices: slices of arrays in the host's memory that XLA of this version of
            jax takes from another place than is meant, so that the step computes
            something else; a note tells what to do.
        time: the predicted seconds and what they are made of, a `StepTime`; None for a
            chip without rates (cpu).
        instructions: what the module was compiled to: its kernels and copies by module
            and operation, counted. Empty in reports that older versions saved.
    """

    def __getattr__(self, name: str) -> Any:
        """Makes the rows when one is first read: a search reads the numbers alone."""
        if name == "advice" and "_late" in self.__dict__:
            self.__dict__.setdefault(name, self.__dict__["_late"].lines())
            self.__dict__.pop("_late", None)
            return self.__dict__[name]
        texts = self.__dict__.get("_texts")
        if name in _FROM_HLO and texts is not None:
            return self.__dict__.setdefault(name, getattr(texts, name)())
        if name in _ROWS and texts is not None:
            alone = {name: getattr(self, name) for name in _FROM_HLO}
            wrong = about_wrong_slices(self.wrong_slices)
            rows = texts.rows() | alone
            self.__dict__.update(rows | {"notes": (*wrong, *rows["notes"])})
            self.__dict__.pop("_texts", None)
        if name not in self.__dict__:  # another thread may have made the rows
            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")
        return self.__dict__[name]

    def compiler_texts(self) -> tuple[str, str, StepFacts] | None:
        """The text of the module, that of its buffer assignment, and the step's facts.

        None once the rows are made of them, and of a report that was read from a file.
        """
        texts = self.__dict__.get("_texts")
        return None if texts is None else texts.module()

    @property
    def seconds(self) -> float | None:
        """Predicted seconds of one step; None for a chip without rates (cpu)."""
        return None if self.time is None else self.time.seconds

    @property
    def padding_bytes(self) -> int:
        """Of the peak, the bytes that tiles fill up: 0 but on a TPU."""
        return sum(buffer.padding for buffer in self.at_peak)

    @property
    def sent_bytes(self) -> int:
        """Bytes that a device sends to others in a step."""
        return sent_bytes(self.collectives)

    def fits(self, memory: int | str | None = None) -> bool:
        """Whether the step fits in memory.

        Args:
            memory: bytes, or text such as `"14GiB"`; the target's own by default.

        Returns:
            Whether `peak_bytes` is at most that.

        Raises:
            ValueError: no memory given and the target has none of its own (cpu).
        """
        limit = self.memory_bytes if memory is None else parse_bytes(memory, "memory")
        if limit is None:
            raise ValueError(
                f"target {self.target!r} has no memory of its own: pass memory=, "
                "bytes or text such as '14GiB'"
            )
        return self.peak_bytes <= limit

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws live bytes over the schedule, stacked by module path.

        Args:
            path: the image to write; its suffix says the format (.png, .svg, .pdf).

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: the compiler dumped no schedule to draw.
        """
        from jaxmem.memory.report.plot import plot_report

        plot_report(self, path)

    def compare(self, other: "MemoryReport") -> "ReportComparison":
        """This report as `before` and another one as `after`, side by side.

        Args:
            other: the report of the changed step, or of the step on another chip.

        Returns:
            A `ReportComparison`: bytes in all, by module and by kind at the peak, with
            the differences. It prints as a table; its page shows both pictures on one
            scale, with one colour a module.

        Raises:
            TypeError: `other` is no `MemoryReport`.
        """
        from jaxmem.memory.report.compare import compare_reports

        if not isinstance(other, MemoryReport):
            raise wrong_type("other", other, "a MemoryReport")
        return compare_reports(self, other)

    def runtime(self, device: Any = None) -> "RuntimeMemory":
        """What a device's allocator has measured, beside this estimate.

        Run the step first, in a process that runs nothing else.

        Args:
            device: a `jax.Device`; the first local one by default.

        Returns:
            A `RuntimeMemory`: the measured peak, the allocator's limit, the largest
            free block and the fragmentation. A device that keeps no statistics (the
            CPU) leaves them None, and the table says so.

        Raises:
            TypeError: `device` is no device.
        """
        from jaxmem.memory.report.runtime import runtime_of

        return runtime_of(self, device)

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON text; `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> "MemoryReport":
        """The report that `to_json` wrote.

        Args:
            text: what `to_json` returned.

        Returns:
            An equal report.

        Raises:
            ValueError: the text is not a report.
        """
        try:
            return from_plain(cls, json.loads(text), "report")
        except (TypeError, ValueError) as error:
            raise ValueError(f"text: not the JSON of a report: {error}") from error

    def __str__(self) -> str:
        from jaxmem.memory.report.text import as_text

        return as_text(self)

    def __rich__(self) -> Any:
        from jaxmem.memory.report.text import as_rich

        return as_rich(self)

    def _html(self) -> tuple[str, Any]:
        from jaxmem.memory.report.html import as_html
        from jaxmem.memory.report.text import headline

        return headline(self), as_html(self)


@dataclass(frozen=True)
class CompilerTexts:
    """The compiler's texts, from which the rows of a report will be made."""

    name: str  # of the step
    packed: bytes  # see `pack`
    target: str  # the chip
    sizes: dict[str, int]  # bytes by `argument_bytes` and so on
    argument_names: list[str]
    donations: Donations | None = None  # None for no notes on donation
    aliases: tuple[tuple[str, int], ...] = ()  # (output index, argument) of reuses
    notes: tuple[str, ...] = ()  # further ones
    facts: StepFacts = StepFacts()  # what the texts may not tell
    trips: int | None = None  # iterations of loops whose text does not tell

    def collectives(self) -> tuple[Collective, ...]:
        """What devices send each other."""
        return collectives_of(parse_hlo(self._dump()["hlo"]))

    def wrong_slices(self) -> tuple[WrongSlice, ...]:
        """Slices of the host's arrays that are taken from another place."""
        if COPIES in self.facts.options:
            return ()
        return wrong_slices(parse_hlo(self._dump()["hlo"]))

    def instructions(self) -> tuple[CompiledOperation, ...]:
        """What the module was compiled to."""
        return compiled_operations(parse_hlo(self._dump()["hlo"]))

    def time(self) -> StepTime | None:
        """The predicted seconds; None for a chip without rates."""
        try:
            return step_time(self._dump()["hlo"], self.target, self.trips)
        except Exception as error:  # the text's format is XLA's own and may change
            why = f"{type(error).__name__}: {error}"
            warnings.warn(f"no seconds are predicted: {why}", stacklevel=2)
            return None

    def module(self) -> tuple[str, str, StepFacts]:
        """The module, its buffer assignment and what they may not tell."""
        dump = self._dump()
        return dump["hlo"], dump.get("buffer_assignment") or "", self.facts

    def _dump(self) -> dict[str, Any]:
        dump = json.loads(zlib.decompress(self.packed))
        hlo = dump.get("hlo") or ""
        return dump | {"hlo": _named(hlo, self.name, self.argument_names)}

    def rows(self) -> dict[str, Any]:
        """The fields of a report that are made from the texts."""
        dump = self._dump()
        rows = attribute(dump, self.sizes, self.argument_names)
        donated = self.donations and self.donations.notes(self.aliases, dump["hlo"])
        return {
            "at_peak": rows.at_peak,
            "peak_step": rows.peak_step,
            "timeline": rows.timeline,
            "notes": (*self.notes, *(donated or ()), *rows.notes),
            "placed": rows.placed,
        }


def pack(dump: dict[str, Any]) -> bytes:
    """The texts that rows are made from, compressed to about a tenth."""
    texts = {k: dump.get(k) for k in ("hlo", "buffer_assignment", "live_range")}
    return zlib.compress(json.dumps(texts).encode(), level=1)


def _named(hlo: str, step: str, names: Sequence[str]) -> str:
    """The text with the user's names, as far as a report shows them."""
    # The worker calls the arguments `leaves[i]`. The calls through which it reaches the
    # step, and the call of a step that the user has jitted, are removed from the names
    # of operations.

    def name(match: re.Match[str]) -> str:
        return names[int(match.group(1))].replace("'", r"\'")

    if names:
        hlo = re.sub(r"(?<=op_name=\")leaves\[(\d+)\](?=\")", name, hlo)
    outer = r"(?<=op_name=\")jit\(step\)/call_exported/jit\(step\)"
    return re.sub(rf"{outer}(/jit\({re.escape(step)}\))?", "jit(step)", hlo)


def make_report(
    result: dict[str, Any],
    *,
    target: Any,
    name: str,
    argument_names: list[str],
    donations: Donations | None = None,
    facts: StepFacts | None = None,
    advice: LateAdvice | None = None,
    trips: int | None = None,
) -> MemoryReport:
    """The report of a compile, whose `texts` are packed."""
    sizes = {f"{k}_bytes": int(result["memory"].get(k, 0)) for k in _SIZES}
    peak = sizes["argument_bytes"] + sizes["output_bytes"]
    host = {k: int(result["memory"].get(f"host_{k}", 0)) for k in _SIZES}
    texts = CompilerTexts(
        name,
        result["texts"],
        target.name,
        sizes,
        argument_names,
        donations,
        tuple(result.get("aliases", ())),
        tuple(result.get("notes", ())),
        facts or StepFacts(),
        trips,
    )
    peak += sizes["temp_bytes"] - sizes["alias_bytes"]
    advice = LateAdvice() if advice is None else advice
    if advice.step is not None:
        about = {"peak_bytes": peak, "argument_bytes": sizes["argument_bytes"]}
        step = dataclasses.replace(advice.step, **about)
        advice = dataclasses.replace(advice, step=step)
    report = object.__new__(MemoryReport)
    report.__dict__.update(
        target=target.name,
        memory_bytes=target.memory_bytes,
        name=name,
        peak_bytes=peak,
        **sizes,
        host_bytes=host["argument"] + host["output"] + host["temp"] - host["alias"],
        cost=dict(result.get("cost") or {}),
        _texts=texts,
        _late=advice,
    )
    return report
