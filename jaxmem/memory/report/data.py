"""What a report holds, and what its text, pages and pictures are made from."""

from dataclasses import dataclass, field

from jaxmem.memory.buffers import Collective, CompiledOperation, WrongSlice
from jaxmem.memory.buffers.rows import PeakBuffer, PlacedBuffer, ScheduleStep
from jaxmem.memory.time.result import StepTime
from jaxmem.pages import SavedResult


@dataclass(frozen=True)
class ReportData(SavedResult):
    """The fields of a `MemoryReport`, which tells what they are."""

    target: str
    memory_bytes: int | None
    name: str
    peak_bytes: int
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    generated_code_bytes: int
    host_bytes: int
    cost: dict[str, float]
    at_peak: tuple[PeakBuffer, ...]
    peak_step: int
    timeline: tuple[ScheduleStep, ...]
    notes: tuple[str, ...]
    # asked for when it is read: to compare reports would be to ask for it
    advice: tuple[str, ...] = field(compare=False)
    # a factory: with a plain default, `__getattr__` would not be asked for it
    placed: tuple[PlacedBuffer, ...] = field(default_factory=tuple)
    collectives: tuple[Collective, ...] = field(default_factory=tuple)
    wrong_slices: tuple[WrongSlice, ...] = field(default_factory=tuple)
    time: StepTime | None = field(default_factory=lambda: None)
    instructions: tuple[CompiledOperation, ...] = field(default_factory=tuple)


def fits_its_chip(report: ReportData) -> bool:
    """Whether the step fits; so it does where the chip's memory is not known."""
    return report.memory_bytes is None or report.peak_bytes <= report.memory_bytes
