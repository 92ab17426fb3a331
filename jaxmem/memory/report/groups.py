"""The buffers at the peak by module, those of equal layers together."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxmem._module_path import merge_numbered
from jaxmem.memory.buffers.rows import FRAGMENTATION, OTHERS, PeakBuffer
from jaxmem.memory.report.data import ReportData

_EXPLAINED = {
    FRAGMENTATION: "holes between live buffers, and alignment",
    OTHERS: "buffers under 0.1 % of the peak each",
}
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class BufferRow:
    """Equal buffers: those of one shape, operation and source line."""

    buffer: PeakBuffer
    bytes: int
    count: int
    padding: int = 0  # of the bytes, those that no element fills

    @property
    def array(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        return times + self.buffer.array

    @property
    def what(self) -> str:
        what = self.buffer.what
        if self.count > 1 and self.buffer.kind != "temp":
            what = _NUMBER.sub("*", what)
        return _EXPLAINED.get(self.buffer.operation, what)

    @property
    def source(self) -> str:
        return os.path.basename(self.buffer.source)


@dataclass(frozen=True)
class BufferGroup:
    """The rows of one module path, or of the same module of several equal layers.

    Attributes:
        module: the path, with a star instead of each layer's number.
        layers: how many layers have buffers at the peak.
        bytes: of all rows.
        rows: the largest first.
    """

    module: str
    layers: int
    bytes: int
    rows: tuple[BufferRow, ...]

    @property
    def label(self) -> str:
        return f"{self.layers} x {self.module}" if self.layers > 1 else self.module


def groups_of(report: ReportData) -> list[BufferGroup]:
    """Buffers by module path and then by kind of buffer, largest first."""
    modules = _modules(report)
    paths: dict[str, set[str]] = {}
    by_module: dict[str, dict[tuple, BufferRow]] = {}
    for b in report.at_peak:
        module = modules[b.group]
        paths.setdefault(module, set()).add(b.group)
        rows = by_module.setdefault(module, {})
        # of arguments the names of equal layers differ in a number
        key = (b.array, _NUMBER.sub("*", b.what), b.source, b.kind)
        row = rows.get(key, BufferRow(b, 0, 0))
        rows[key] = replace(
            row,
            bytes=row.bytes + b.bytes,
            count=row.count + 1,
            padding=row.padding + b.padding,
        )
    groups = [
        BufferGroup(
            module,
            len(paths[module]),
            sum(row.bytes for row in rows.values()),
            tuple(sorted(rows.values(), key=lambda row: -row.bytes)),
        )
        for module, rows in by_module.items()
    ]
    return sorted(groups, key=lambda g: -g.bytes)


def _modules(report: ReportData) -> dict[str, str]:
    """The label of each group at the peak, the same one as in the timeline."""
    merged = merge_numbered(b.group for b in report.at_peak)
    # Of some layers few have a large buffer at the peak: the timeline has seen more.
    stars = [m for m in _in_timeline(report) if "*" in m]
    forms = [(m, re.compile(r"\d+".join(map(re.escape, m.split("*"))))) for m in stars]
    for group in merged:
        for module, form in forms:
            if form.fullmatch(group):
                merged[group] = module
                break
    return merged


def _in_timeline(report: ReportData) -> Iterable[str]:
    steps = (module for step in report.timeline for module, _ in step.by_module)
    return dict.fromkeys([*steps, *(b.module for b in report.placed)])
