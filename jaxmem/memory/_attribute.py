"""From the compiler's dump to the rows of a report.

Rows of each kind add up to what the compiler reports for that kind: buffers below a
thousandth of the peak are one row, and what no live value fills is another.
"""

from collections import Counter
from dataclasses import dataclass

from jaxmem.memory._advice import CURVES, advise
from jaxmem.memory._bytes import format_bytes
from jaxmem.memory._dump import (
    Allocation,
    array_shape,
    parse_buffer_assignment,
    parse_live_range,
)
from jaxmem.memory._hlo import Hlo, parse_hlo
from jaxmem.memory._holder import (
    FRAGMENTATION,
    OTHERS,
    Holder,
    Kind,
    ScheduleStep,
    numpy_dtype,
)
from jaxmem.memory._live import Held, LiveMap, temporaries
from jaxmem.memory._module_path import merge_numbered
from jaxmem.memory._origin import Origin, Tracer

_SMALLEST = 1e-3
_SAMPLES = 200
_MODULES = 14
_TWICE = 0.01


@dataclass(frozen=True)
class Attribution:
    """The rows that `MemoryReport` shows."""

    at_peak: tuple[Holder, ...]
    peak_step: int
    timeline: tuple[ScheduleStep, ...]
    notes: tuple[str, ...]
    advice: tuple[str, ...] = ()


def attribute(
    dump: dict[str, str | None], sizes: dict[str, int], argument_names: list[str]
) -> Attribution:
    """Rows from the dumped texts; one row a kind where the compiler dumped none."""
    hlo, assignment = dump.get("hlo"), dump.get("buffer_assignment")
    live_range = dump.get("live_range")
    if not (hlo and assignment and live_range):
        note = "the compiler dumped no buffer assignment: who holds what is unknown"
        return Attribution(_coarse(sizes), 0, (), (note,))
    try:
        return _attribute(hlo, assignment, live_range, sizes, argument_names)
    except Exception as error:  # the text's format is XLA's own and may change
        note = (
            "the compiler's buffer assignment could not be read "
            f"({type(error).__name__}: {error}): who holds what is unknown"
        )
        return Attribution(_coarse(sizes), 0, (), (note,))


def _attribute(hlo_text, assignment, live_range, sizes, names) -> Attribution:
    hlo = parse_hlo(hlo_text)
    tracer = Tracer(hlo)
    allocations = parse_buffer_assignment(assignment)
    live = parse_live_range(live_range)
    if not allocations or not live.ranges:
        raise ValueError("no allocations found in the text")
    live_map = LiveMap(temporaries(allocations, sizes["temp_bytes"]), live)
    peak_step = live_map.peak_step()
    held = live_map.held(peak_step)
    rows: dict[Kind, list[Holder]] = {
        "argument": _arguments(allocations, names, hlo),
        "output": _outputs(allocations, hlo, tracer),
        "temp": [_temp(h, tracer) for h in held],
    }
    at_peak = _complete(rows, sizes, sum(h.bytes for h in held))
    return Attribution(
        at_peak,
        peak_step,
        _timeline(live_map, live.sequence, tracer, sizes),
        _kept_twice(at_peak),
        advise(at_peak, _curved(hlo, tracer)),
    )


def _arguments(allocations, names: list[str], hlo: Hlo) -> list[Holder]:
    found = []
    for a in allocations:
        if a.kind == "parameter" and a.values:
            value = a.values[0]
            number = len(names) if a.parameter is None else a.parameter
            known = names[number : number + 1] or [_own_name(hlo, value.name)]
            donated = " (donated)" if a.live_out else ""
            found.append(_holder(a.size, "argument", known[0] + donated, value.shape))
    return found


def _own_name(hlo: Hlo, parameter: str) -> str:
    """The name JAX gave a parameter, `params['w']`."""
    instruction = hlo.instruction(parameter)
    return instruction.metadata.get("op_name", parameter) if instruction else parameter


def _outputs(allocations: list[Allocation], hlo: Hlo, tracer: Tracer) -> list[Holder]:
    """Outputs that lie in no donated argument."""
    where = {v.key: (a, v) for a in allocations if a.live_out for v in a.values}
    root = hlo.instruction(hlo.roots.get(hlo.entry, ""))
    if root is None:
        return []
    is_tuple = root.opcode == "tuple"
    found, seen = [], set()
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
        found.append(_holder(allocation.size, "output", name, value.shape, origin))
    return found


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


def _temp(held: Held, tracer: Tracer) -> Holder:
    value = held.value
    origin = tracer.origin(*value.key)
    return _holder(held.bytes, "temp", value.name, value.shape, origin)


def _holder(
    size: int, kind: Kind, name: str, shape: str, origin: Origin | None = None
) -> Holder:
    dtype, dimensions = array_shape(shape) or ("", ())
    if origin is None:
        return Holder(size, kind, name, dimensions, numpy_dtype(dtype))
    return Holder(
        bytes=size,
        kind=kind,
        name=name,
        shape=dimensions,
        dtype=numpy_dtype(dtype),
        operation=origin.name.operation,
        opcode=origin.opcode,
        module_path=origin.name.module_path,
        function=origin.function,
        source=origin.source,
        backward=origin.name.backward,
    )


def _complete(
    rows: dict[Kind, list[Holder]], sizes: dict[str, int], live: int
) -> tuple[Holder, ...]:
    """The rows worth showing, with the rest of each kind as a row of its own."""
    totals = _totals(sizes)
    least = _SMALLEST * sum(totals.values())
    shown, rest = [], []
    for kind, total in totals.items():
        large = [h for h in rows[kind] if h.bytes >= least]
        shown += large
        left = total - sum(h.bytes for h in large)
        if kind == "temp" and (holes := max(total - live, 0)):
            rest.append(Holder(holes, kind, operation=FRAGMENTATION))
            left -= holes
        if left:
            rest.append(Holder(left, kind, operation=OTHERS))
    order = sorted(shown, key=lambda h: -h.bytes)
    return (*order, *sorted(rest, key=lambda h: -h.bytes))


def _coarse(sizes: dict[str, int]) -> tuple[Holder, ...]:
    totals = _totals(sizes)
    return tuple(Holder(n, kind, operation=OTHERS) for kind, n in totals.items() if n)


def _totals(sizes: dict[str, int]) -> dict[Kind, int]:
    return {
        "temp": sizes["temp_bytes"],
        "argument": sizes["argument_bytes"],
        "output": sizes["output_bytes"] - sizes["alias_bytes"],
    }


def _timeline(live_map, sequence, tracer, sizes) -> tuple[ScheduleStep, ...]:
    """Live bytes by module at some two hundred steps of the schedule."""
    steps = live_map.samples(_SAMPLES) if live_map.values else []
    by_step = {step: _by_module(live_map.held(step), tracer) for step in steps}
    merged = merge_numbered(m for modules in by_step.values() for m in modules)
    fullest: Counter[str] = Counter()
    for step, modules in by_step.items():
        by_step[step] = _renamed(modules, merged)
        fullest |= by_step[step]
    kept = {module for module, _ in fullest.most_common(_MODULES)}
    totals = _totals(sizes)
    base = Counter({f"({k}s)": n for k, n in totals.items() if n and k != "temp"})
    return tuple(
        _step(i, _label(sequence, i, tracer), base, modules, kept)
        for i, modules in by_step.items()
    )


def _step(index, label, base, modules, kept) -> ScheduleStep:
    named = {m: m if m in kept else f"({OTHERS})" for m in modules}
    counts = base + _renamed(modules, named)
    return ScheduleStep(index, label, counts.total(), tuple(counts.most_common()))


def _by_module(held: list[Held], tracer: Tracer) -> Counter[str]:
    counts: Counter[str] = Counter()
    for h in held:
        counts[tracer.origin(*h.value.key).group] += h.bytes
    return counts


def _renamed(counts: Counter[str], names: dict[str, str]) -> Counter[str]:
    renamed: Counter[str] = Counter()
    for key, n in counts.items():
        renamed[names[key]] += n
    return renamed


def _label(sequence: tuple[str, ...], index: int, tracer: Tracer) -> str:
    if index >= len(sequence):
        return ""
    origin = tracer.origin(sequence[index])
    what = origin.name.operation or origin.opcode
    return f"{origin.group}: {what}"


def _curved(hlo: Hlo, tracer: Tracer) -> set[tuple[str, str]]:
    """The source lines and modules that compute a tanh, an erf or the like."""
    ends = tuple(f'/{operation}"' for operation in CURVES)
    names = (n for n, (_, rest) in hlo.lines.items() if any(e in rest for e in ends))
    return {(o.source, o.group) for o in map(tracer.origin, names)}


def _kept_twice(at_peak: tuple[Holder, ...]) -> tuple[str, ...]:
    """Arguments of which the whole program keeps a copy in another type."""
    least = _TWICE * sum(h.bytes for h in at_peak)
    copies = [h for h in at_peak if h.operation.startswith("cast of ")]
    return tuple(
        f"argument {h.operation.removeprefix('cast of ')} is kept twice: cast to "
        f"{h.array} it takes another {format_bytes(h.bytes)} at the peak"
        for h in copies
        if h.bytes >= least
    )
