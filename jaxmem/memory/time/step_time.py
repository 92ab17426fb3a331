"""What a step takes in time, predicted from a compiled module."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from jaxmem.chips import CHIPS, is_gpu, is_timed, rates_of
from jaxmem.memory.buffers.hlo import Hlo, parse_hlo
from jaxmem.memory.buffers.origin import Tracer
from jaxmem.memory.buffers.rows import operation_of
from jaxmem.memory.time.fills import OPTION, fills
from jaxmem.memory.time.result import OperationTime, StepTime
from jaxmem.memory.time.schedule import Timed, TimedKernel, timed, total
from jaxmem.memory.time.spans import spans_of

_SHOWN = 100  # operations that are kept, the slowest
_REMAT = ".remat"  # in the name of what XLA's rematerialization pass has added
_WORTH_SAYING = 0.01  # of a step's seconds


def step_time(text: str, target: str, trips: int | None = None) -> StepTime | None:
    """The time of a step, from the text of its module; None for a chip without rates.

    Args:
        text: of the compiled, scheduled module.
        target: a name of `jaxmem.targets()`.
        trips: iterations of loops whose text does not tell; None counts one.
    """
    if not is_timed(target) or not text:
        return None
    hlo = parse_hlo(text)
    found = timed(hlo, rates_of(target), trips)
    return _result(hlo, found, target, trips)


def _result(hlo: Hlo, found: Timed, target: str, trips: int | None) -> StepTime:
    tracer = Tracer(hlo)
    filled = _filled(hlo, found) if is_gpu(target) else ()
    rows = _rows(tracer, found.kernels)
    seconds = sum(row.seconds for row in rows)
    return StepTime(
        seconds=seconds,
        by_bound=_summed((row.bound, row.seconds) for row in rows),
        by_module=_summed((row.module, row.seconds) for row in rows),
        operations=tuple(rows[:_SHOWN]),
        kernels=sum(row.times for row in rows),
        flops=sum(row.flops for row in rows),
        bytes=sum(row.bytes for row in rows),
        peak_flops=CHIPS[target].machine.narrow * seconds,
        recomputed_flops=_recomputed(tracer, found.kernels),
        spans=spans_of(
            (tracer.kernel(one.name).group, one.bound, one.times, one.seconds)
            for one in found.kernels
        ),
        notes=(*_notes(tracer, found, trips), *filled),
    )


def _recomputed(tracer: Tracer, kernels: list[TimedKernel]) -> float:
    """Flops of products that a step does a second time."""
    again = lambda one: tracer.kernel(one.name).name.recomputed
    return sum(
        one.times * (one.flops if again(one) else one.repeated_flops)
        for one in kernels
        if one.flops
    )


def _summed(pairs: Iterable[tuple]) -> tuple[tuple, ...]:
    sums: Counter = Counter()
    for key, seconds in pairs:
        sums[key] += seconds
    return tuple(sums.most_common())


def _rows(tracer: Tracer, kernels: list[TimedKernel]) -> list[OperationTime]:
    """Kernels of one line, operation and bound as one row, the slowest first."""
    rows: dict[tuple, OperationTime] = {}
    for one in kernels:
        origin = tracer.kernel(one.name)
        name = origin.name
        what = operation_of(name.module_path, name.operation, origin.opcode)
        key = origin.group, what, origin.source, one.bound, name.backward
        before = rows.get(key)
        rows[key] = OperationTime(
            seconds=one.times * one.seconds + (before.seconds if before else 0.0),
            times=int(one.times) + (before.times if before else 0),
            bound=one.bound,
            flops=one.times * one.flops + (before.flops if before else 0.0),
            bytes=int(one.times * one.bytes) + (before.bytes if before else 0),
            what=what,
            module=origin.group,
            source=origin.source,
            backward=name.backward,
        )
    return sorted(rows.values(), key=lambda row: -row.seconds)


def _notes(tracer: Tracer, found: Timed, trips: int | None):
    """Sentences about what the text does not tell."""
    for loop in dict.fromkeys(found.unknown_trips):
        place = tracer.kernel(loop)
        counted = f"{trips} iterations" if trips else "one iteration"
        yield (
            f"the compiled module does not tell how often the loop at "
            f"{place.source or place.group} runs: {counted} is counted; pass trips="
        )
    yield from _unknown(tracer, found)
    yield from _unasked(found)


def _filled(hlo: Hlo, found: Timed) -> Iterator[str]:
    """Of stacks that are filled before a loop writes them."""
    seconds = total(fills(hlo, found.kernels))
    if seconds > _WORTH_SAYING * total(found.kernels):
        yield (
            f"{1e3 * seconds:.3g} ms fill what loops stack (residuals, gradients of "
            "scanned layers) with zeros, which the iterations then write over. With "
            f"compiler_options={{{OPTION!r}: True}} XLA leaves them as they are: not "
            "for a loop that reads its stack before it is full, such as a decoder's"
        )


def _unasked(found: Timed) -> Iterator[str]:
    """Of what XLA recomputes where a step is near the memory of its chip."""
    again = [one for one in found.kernels if _REMAT in one.name]
    seconds = total(again)
    if seconds > _WORTH_SAYING * total(found.kernels):
        yield (
            f"XLA recomputes {len(again)} operations unasked, {1e3 * seconds:.3g} ms "
            "of the step: it plans with less memory than the chip has. A step that "
            "takes fewer bytes is faster: a policy, `jaxmem.schedule`, a smaller batch"
        )


def _unknown(tracer: Tracer, found: Timed) -> Iterator[str]:
    """Of custom calls that declare no cost."""
    names, groups = set(found.unknown_calls), defaultdict[str, float](float)
    for one in found.kernels:
        if one.name in names:
            groups[tracer.kernel(one.name).group] += one.times * one.bytes
    moved = sum(one.times * one.bytes for one in found.kernels)
    for group, size in sorted(groups.items(), key=lambda row: -row[1]):
        yield (
            f"custom calls in {group} are counted by their bytes alone, "
            f"{100 * size / max(1, moved):.1f} % of the step's: they declare no cost"
        )
