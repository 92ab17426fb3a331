"""The temporaries over the schedule: live bytes by module, and the larger buffers."""

from collections import Counter
from collections.abc import Iterator, Mapping

from jaxmem._module_path import merge_numbered
from jaxmem.memory.buffers.assignment import array_shape
from jaxmem.memory.buffers.live import LiveMap, LiveValue, merged_spans
from jaxmem.memory.buffers.origin import Origin, Tracer
from jaxmem.memory.buffers.rows import (
    OTHERS,
    Kind,
    PlacedBuffer,
    ScheduleStep,
    numpy_dtype,
    operation_of,
    short_dtype,
)

_SAMPLES = 200  # steps of the timeline
_MODULES = 14  # modules of the timeline, beside "others"
_PLACED = 1000  # buffers that are placed at most, the largest ones


def timeline(
    live_map: LiveMap,
    sequence: tuple[str, ...],
    tracer: Tracer,
    totals: Mapping[Kind, int],  # bytes by kind, which are there at each step
    least: float,
) -> tuple[tuple[ScheduleStep, ...], tuple[PlacedBuffer, ...]]:
    """Live bytes by module at some two hundred steps, and buffers of `least` bytes."""
    steps = live_map.samples(_SAMPLES) if live_map.values else []
    by_step = {step: _by_module(live_map.values_at(step), tracer) for step in steps}
    buffers = list(_placed(live_map, tracer, least))
    merged = merge_numbered(
        [*(m for modules in by_step.values() for m in modules)]
        + [origin.group for _, origin in buffers]
    )
    fullest: Counter[str] = Counter()
    for step, modules in by_step.items():
        by_step[step] = _renamed(modules, merged)
        fullest |= by_step[step]
    named = {module for module, _ in fullest.most_common(_MODULES)}
    base = Counter({f"({k}s)": n for k, n in totals.items() if n and k != "temp"})
    samples = (
        _step(i, _label(sequence, i, tracer), base, modules, named)
        for i, modules in by_step.items()
    )
    places = (_row(live_map, at, origin, merged) for at, origin in buffers)
    return tuple(samples), tuple(places)


# (number of the value, first step, last step) and the origin of what it holds
_Placed = tuple[tuple[int, int, int], Origin]


def _placed(live_map: LiveMap, tracer: Tracer, least: float) -> Iterator[_Placed]:
    """The larger values in the order in which they are written."""
    # A loop's carry, its body's parameter and its result are values of one place and
    # one origin, alive one after the other: they are one buffer.
    sizes = [value.size for value in live_map.values]
    largest = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    places: dict[tuple[int, int, Origin], list[int]] = {}
    for i in largest:
        if sizes[i] < least or len(places) == _PLACED:
            break
        value = live_map.values[i]
        key = value.offset, value.size, tracer.origin(*value.key)
        places.setdefault(key, []).append(i)
    found: list[_Placed] = []
    for (*_, origin), values in places.items():
        spans = [(int(live_map.starts[i]), int(live_map.ends[i])) for i in values]
        found += [((values[0], *span), origin) for span in merged_spans(spans)]
    found.sort(key=lambda item: -live_map.values[item[0][0]].size)
    yield from sorted(found[:_PLACED], key=lambda item: item[0][1:])


def _row(
    live_map: LiveMap,
    at: tuple[int, int, int],
    origin: Origin,
    merged: dict[str, str],
) -> PlacedBuffer:
    number, start, end = at
    value = live_map.values[number]
    dtype, shape = array_shape(value.shape) or ("", ())
    return PlacedBuffer(
        bytes=value.size,
        offset=value.offset,
        start=start,
        end=min(end, live_map.steps - 1),
        array=f"{short_dtype(numpy_dtype(dtype))}[{','.join(map(str, shape))}]",
        what=operation_of(
            origin.name.module_path, origin.name.operation, origin.opcode
        ),
        module=merged[origin.group],
        source=origin.source,
        name=value.name,
    )


def _step(index, label, base, modules, named) -> ScheduleStep:
    labels = {m: m if m in named else f"({OTHERS})" for m in modules}
    counts = base + _renamed(modules, labels)
    return ScheduleStep(index, label, counts.total(), tuple(counts.most_common()))


def _by_module(live: list[LiveValue], tracer: Tracer) -> Counter[str]:
    counts: Counter[str] = Counter()
    for v in live:
        counts[tracer.origin(*v.value.key).group] += v.bytes
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
