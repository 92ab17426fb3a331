"""From the texts that the compiler dumps to the rows of a report.

The rows of each kind add up to the bytes that the compiler reports for that kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxmem._bytes import format_bytes
from jaxmem.memory.buffers.assignment import (
    HOST,
    Allocation,
    array_shape,
    parse_buffer_assignment,
    parse_live_range,
)
from jaxmem.memory.buffers.hlo import Hlo, parse_hlo
from jaxmem.memory.buffers.live import LiveMap, LiveValue, temporaries
from jaxmem.memory.buffers.origin import Origin, Tracer
from jaxmem.memory.buffers.padding import layout_of, padding_of
from jaxmem.memory.buffers.rows import (
    FRAGMENTATION,
    OTHERS,
    Kind,
    PeakBuffer,
    PlacedBuffer,
    ScheduleStep,
    numpy_dtype,
)
from jaxmem.memory.buffers.timeline import timeline

DONATED = " (donated)"  # follows the name of an argument whose memory is used
_SMALLEST = 1e-3  # of the peak: buffers below it share a row
_TWICE = 0.01  # of the peak: copies of arguments below it have no note


@dataclass(frozen=True)
class Attribution:
    """The rows that `MemoryReport` shows."""

    at_peak: tuple[PeakBuffer, ...]  # the buffers alive at the peak
    peak_step: int  # the step of the schedule at which the temporaries are fullest
    timeline: tuple[ScheduleStep, ...]  # live bytes at some steps of the schedule
    notes: tuple[str, ...]  # sentences for the report
    placed: tuple[PlacedBuffer, ...] = ()  # the larger temporaries


def attribute(
    dump: Mapping[str, str | None], sizes: dict[str, int], argument_names: list[str]
) -> Attribution:
    """Rows from the dumped texts; one row a kind where the compiler dumped none."""
    hlo, assignment = dump.get("hlo"), dump.get("buffer_assignment")
    live_range = dump.get("live_range")
    if not (hlo and assignment and live_range):
        note = (
            "the compiler dumped no buffer assignment: buffers cannot be attributed to "
            "operations"
        )
        return Attribution(_coarse(sizes), 0, (), (note,))
    try:
        return _attribute(hlo, assignment, live_range, sizes, argument_names)
    except Exception as error:  # the text's format is XLA's own and may change
        note = (
            "the compiler's buffer assignment could not be read "
            f"({type(error).__name__}: {error}): buffers cannot be attributed "
            "to operations"
        )
        return Attribution(_coarse(sizes), 0, (), (note,))


def buffers_at_peak(
    hlo: str, assignment: str, live_range: str, temp_bytes: int, names: list[str]
) -> tuple[PeakBuffer, ...]:
    """The rows of a program by what XLA dumps; `names`: of its arguments."""
    sizes = {"temp_bytes": temp_bytes, "argument_bytes": 0, "output_bytes": 0}
    sizes["alias_bytes"] = 0
    for a in parse_buffer_assignment(assignment):
        if a.color == 0:
            is_argument = a.kind == "parameter"
            sizes["argument_bytes"] += a.size * is_argument
            sizes["output_bytes"] += a.size * a.live_out
            sizes["alias_bytes"] += a.size * (is_argument and a.live_out)
    texts = {"hlo": hlo, "buffer_assignment": assignment, "live_range": live_range}
    return attribute(texts, sizes, names).at_peak


def _attribute(hlo_text, assignment, live_range, sizes, names) -> Attribution:
    hlo = parse_hlo(hlo_text)
    tracer = Tracer(hlo)
    everywhere = parse_buffer_assignment(assignment)
    allocations = [a for a in everywhere if a.color != HOST]
    live = parse_live_range(live_range)
    if not allocations or not live.ranges:
        raise ValueError("no allocations found in the text")
    live_map = LiveMap(temporaries(allocations, sizes["temp_bytes"]), live)
    peak_step = live_map.peak_step()
    live_values = live_map.values_at(peak_step)
    rows: dict[Kind, list[PeakBuffer]] = {
        "argument": _arguments(allocations, names, hlo),
        "output": _outputs(allocations, hlo, tracer),
        "temp": [_temp(v, tracer) for v in live_values],
    }
    at_peak = _complete(rows, sizes, sum(v.bytes for v in live_values))
    totals = _totals(sizes)
    least = _SMALLEST * sum(totals.values())
    samples, placed = timeline(live_map, live.sequence, tracer, totals, least)
    notes = _in_memory_twice(at_peak)
    return Attribution(at_peak, peak_step, samples, notes, placed)


def _arguments(allocations, names: list[str], hlo: Hlo) -> list[PeakBuffer]:
    buffers = []
    for a in allocations:
        if a.kind == "parameter" and a.values:
            value = a.values[0]
            number = len(names) if a.parameter is None else a.parameter
            known = names[number : number + 1] or [_jax_name(hlo, value.name)]
            donated = DONATED if a.live_out else ""
            buffers.append(_buffer(a.size, "argument", known[0] + donated, value.shape))
    return buffers


def _jax_name(hlo: Hlo, parameter: str) -> str:
    """The name JAX gave a parameter, `params['w']`."""
    instruction = hlo.instruction(parameter)
    return instruction.metadata.get("op_name", parameter) if instruction else parameter


def _outputs(
    allocations: list[Allocation], hlo: Hlo, tracer: Tracer
) -> list[PeakBuffer]:
    """The outputs that do not reuse the buffer of a donated argument."""
    where = {v.key: (a, v) for a in allocations if a.live_out for v in a.values}
    root = hlo.instruction(hlo.roots.get(hlo.entry, ""))
    if root is None:
        return []
    is_tuple = root.opcode == "tuple"
    buffers, seen = [], set()
    for i, operand in enumerate(root.operands if is_tuple else (root.name,)):
        key = _element(hlo, operand)
        if key not in where:
            continue
        allocation, value = where[key]
        if allocation.kind != "output" or allocation.number in seen:
            continue
        seen.add(allocation.number)
        origin = tracer.origin(*key)
        name = f"output {i}" if is_tuple else "output"
        buffers.append(_buffer(allocation.size, "output", name, value.shape, origin))
    return buffers


def _element(hlo: Hlo, name: str) -> tuple[str, tuple[int, ...]]:
    """The value an operand names, through get-tuple-elements and bitcasts."""
    index: tuple[int, ...] = ()
    while (at := hlo.instruction(name)) is not None:
        if at.opcode == "get-tuple-element":
            index = (at.element, *index)
        elif at.opcode != "bitcast":
            break
        name = at.operands[0]
    return name, index


def _temp(live: LiveValue, tracer: Tracer) -> PeakBuffer:
    value = live.value
    origin = tracer.origin(*value.key)
    whole = _buffer(value.size, "temp", value.name, value.shape, origin)
    # of a value that another one covers in part, that share of its padding
    padding = whole.padding * live.bytes // value.size
    return replace(whole, bytes=live.bytes, padding=padding)


def _buffer(
    size: int, kind: Kind, name: str, shape: str, origin: Origin | None = None
) -> PeakBuffer:
    dtype, dimensions = array_shape(shape) or ("", ())
    plain = PeakBuffer(
        size,
        kind,
        name,
        dimensions,
        numpy_dtype(dtype),
        padding=padding_of(shape, size),
        layout=layout_of(shape),
    )
    if origin is None:
        return plain
    return replace(
        plain,
        operation=origin.name.operation,
        opcode=origin.opcode,
        module_path=origin.name.module_path,
        function=origin.function,
        source=origin.source,
        backward=origin.name.backward,
    )


def _complete(
    rows: dict[Kind, list[PeakBuffer]], sizes: dict[str, int], live: int
) -> tuple[PeakBuffer, ...]:
    """The larger rows, and one row for the rest of each kind."""
    totals = _totals(sizes)
    least = _SMALLEST * sum(totals.values())
    shown, rest = [], []
    for kind, total in totals.items():
        large = [h for h in rows[kind] if h.bytes >= least]
        shown += large
        left = total - sum(h.bytes for h in large)
        if kind == "temp" and (holes := max(total - live, 0)):
            rest.append(PeakBuffer(holes, kind, operation=FRAGMENTATION))
            left -= holes
        if left:
            small = sum(h.padding for h in rows[kind] if h.bytes < least)
            rest.append(PeakBuffer(left, kind, operation=OTHERS, padding=small))
    order = sorted(shown, key=lambda h: -h.bytes)
    return (*order, *sorted(rest, key=lambda h: -h.bytes))


def _coarse(sizes: dict[str, int]) -> tuple[PeakBuffer, ...]:
    totals = _totals(sizes)
    return tuple(
        PeakBuffer(n, kind, operation=OTHERS) for kind, n in totals.items() if n
    )


def _totals(sizes: dict[str, int]) -> dict[Kind, int]:
    return {
        "temp": sizes["temp_bytes"],
        "argument": sizes["argument_bytes"],
        "output": sizes["output_bytes"] - sizes["alias_bytes"],
    }


def _in_memory_twice(at_peak: tuple[PeakBuffer, ...]) -> tuple[str, ...]:
    """Notes on the arguments of which the program keeps a copy in another type."""
    least = _TWICE * sum(h.bytes for h in at_peak)
    copies = [h for h in at_peak if h.operation.startswith("cast of ")]
    return tuple(
        f"argument {h.operation.removeprefix('cast of ')} is in memory twice: cast to "
        f"{h.array} it takes another {format_bytes(h.bytes)} at the peak"
        for h in copies
        if h.bytes >= least
    )
