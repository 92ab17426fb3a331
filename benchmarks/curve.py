"""Time over memory for the zoo: `schedule`'s choices beside stock checkpoint policies.

    python -m benchmarks.curve                  # every model at batch 32
    python -m benchmarks.curve gpt2_xl vgg16    # some; rows of others are kept
    python -m benchmarks.curve --picture        # the picture alone

All in the graph's own accounting, nothing compiled: bytes are the temporaries at the
predicted peak, "more time" what the added operations take at the rates of an H100, in
per cent of the step. Of `schedule`'s choices some are printed that no other beats; a
policy goes round each layer or block as `nn.remat` does, round the whole loss where
a net has none (`zoo.step`), and its peak is the lower of XLA's order and its own.
"ours" is the time that our choices, joined by straight lines (some layers do the one,
some the other), take at a policy's bytes. Less than none is where what is recomputed
costs less than writing it and reading it back.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks._common import MIB, as_a_whole, publish, published, write
from benchmarks._pictures import IMAGES, OURS, picture, plain_ticks
from benchmarks.blocks import POLICIES, TARGET
from benchmarks.models import zoo
from benchmarks.scheduling import Case, cases
from jaxmem import planning
from jaxmem.chips import rates_of
from jaxmem.cost.equations import seconds
from jaxmem.ir import jaxprs as _jaxpr
from jaxmem.ir.graph import by_shape
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling.order.ordered import sequences
from jaxmem.scheduling.predict.operations import operations_of
from jaxmem.scheduling.predict.prediction import predicted
from jaxmem.scheduling.recompute.front import pareto_front
from jaxmem.scheduling.recompute.recompute_segments import in_segments
from jaxmem.scheduling.recompute.space import lists_in, scans_in, space_of

CHIP = rates_of(TARGET)
BATCH = 32
SHOWN = 10  # of our choices
PICTURE, ACROSS = IMAGES / "curve.svg", 4
_CLOSE = 0.98  # of the fewest bytes: still the same
CASES = [case for case in cases(list(zoo.ZOO)) if case.batch == BATCH]
COLUMNS = ("model", "layers", "batch", "strategy", "MiB", "more time %", "ours %")


class Traced(NamedTuple):
    """A step, and which outputs lie in which inputs' memory."""

    closed: Any
    aliases: Mapping[int, int]

    def temporaries(self, written: bool = False) -> int:
        """At the predicted peak; `written`: or in the order of the jaxpr, if less."""
        found = predicted(*self)
        peaks = found.temp_bytes, found.program_bytes
        return min(peaks) if written else found.temp_bytes

    def seconds(self, scanned: bool) -> float:
        """As the choices are priced: by equations in loops, else by kernels."""
        if scanned:
            return sum(seconds(e, CHIP) or 0.0 for e in self.closed.eqns)
        cost = planning.seconds(CHIP.narrow, CHIP.bandwidth)
        return sum(map(cost, operations_of(*self).graph.operations))


def traced(case: Case, policy=None) -> Traced:
    step, args, _ = zoo.step(case.model, case.batch, case.scanned, policy)
    closed = _jaxpr.trace(step, *args).jaxpr
    return Traced(closed, by_shape(closed, range(len(jax.tree.leaves(args[0])))))


def choices(step: Traced, whole: float) -> Iterator[tuple[int, float]]:
    """(bytes, seconds more) of what `schedule` would choose from.

    `whole`: the seconds of the step. Of layers that are written out it is some of the
    choices, fused anew as steps of their own.
    """
    first = rewrite(*step, choice=Choice(TARGET))
    space = space_of(scans_in(first), lists_in(first), TARGET)
    if space.is_unrolled:
        candidates = sequences(first.unordered, step.aliases, TARGET)
        orders = {(size, time): order for order, size, time in candidates}
        for point in some(unbeaten(orders)):
            choice = Choice(TARGET, (orders[point],))
            less = Traced(rewrite(*step, choice=choice).jaxpr, step.aliases)
            more = less.seconds(scanned=False) - whole
            yield less.temporaries(written=True), more
        return
    flat = pareto_front(space)
    for candidate in [*flat, *in_segments(space, flat)]:
        less = Traced(rewrite(*step, choice=candidate.choice).jaxpr, step.aliases)
        yield less.temporaries(), candidate.seconds


def unbeaten(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points that no other beats in bytes and time, the fewest bytes first."""
    found: list[tuple[int, float]] = []
    for size, time in sorted(points, key=lambda point: point[::-1]):
        if not found or size < found[-1][0]:
            found.append((size, time))
    return found[::-1]


def some(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The ends, and points at about equal ratios of bytes between them."""
    sizes = [size for size, _ in points]
    wanted = np.geomspace(sizes[0], sizes[-1], SHOWN)
    return [points[k] for k in sorted({int(np.searchsorted(sizes, w)) for w in wanted})]


def rows(case: Case) -> Iterator[tuple]:
    plain = traced(case)
    whole = plain.seconds(case.scanned)
    mine = [
        (size, 100 * time / whole) for size, time in unbeaten(choices(plain, whole))
    ]
    for size, more in some(mine):
        yield *case.key, "schedule", size / MIB, more, ""
    for name, policy in POLICIES.items():
        step = traced(case, policy)
        size = step.temporaries(written=policy is not None)
        more = 100 * (step.seconds(case.scanned) / whole - 1)
        yield *case.key, name, size / MIB, more, interpolated(mine, size)


def interpolated(points: list[tuple[int, float]], size: int) -> float | str:
    """The time at some bytes; nothing where they are too few."""
    if size < _CLOSE * points[0][0]:
        return ""
    sizes, times = zip(*points, strict=True)
    return float(np.interp(size, sizes, times))


def draw(rows: list[list[str]]) -> None:
    """A panel a model: more time over bytes."""
    names = list(dict.fromkeys(tuple(row[:3]) for row in rows))
    down = -(-len(names) // ACROSS)
    with picture(PICTURE, (3 * ACROSS, 2.4 * down)) as figure:
        panels = figure.subplots(down, ACROSS, squeeze=False).flat
        for axes, name in zip(panels, names, strict=False):
            own = [r[3:6] for r in rows if tuple(r[:3]) == name]
            _panel(axes, f"{name[0]}, {name[1]}", own)
        for axes in list(panels):
            axes.set_axis_off()
        figure.supxlabel("MiB of temporaries")
        figure.supylabel("more time, %")
        handles = figure.axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=len(handles[0]))


def _panel(axes, title: str, own: list[list[str]]) -> None:
    at = lambda row: tuple(map(float, row[1:]))
    line = [at(row) for row in own if row[0] == "schedule"]
    axes.plot(
        *zip(*line, strict=True), "-o", color=OURS, markersize=3, label="schedule"
    )
    for row in own:
        if row[0] != "schedule":
            axes.plot(*at(row), "x", label=row[0])
    axes.set(title=title, xscale="log", ylim=(-10, None))
    plain_ticks(axes.xaxis)


def main() -> None:
    """One model after another, each published as soon as it is there."""
    order = {case.key: n for n, case in enumerate(CASES)}
    models = sys.argv[1:] or zoo.ZOO
    if "--picture" in models:
        return draw(published("curve"))
    as_a_whole()
    for case in CASES:
        if case.model not in models:
            continue
        others = (row for row in published("curve") if tuple(row[:3]) != case.key)
        found = [*others, *rows(case)]
        found.sort(key=lambda row: order[tuple(row[:3])])
        write("curve", COLUMNS, found)
        print(*case.key, "done", flush=True)
    publish("curve", COLUMNS, published("curve"))
    return draw(published("curve"))


if __name__ == "__main__":
    main()
