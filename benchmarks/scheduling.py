"""Order and layout of the zoo's training steps, in the graph's own accounting.

    python -m benchmarks.scheduling                     # every model, batch 1 and 32
    python -m benchmarks.scheduling gpt2_small vgg16    # some; rows of others are kept
    python -m benchmarks.scheduling --compile ...       # compiled for an H100 as well
    python -m benchmarks.scheduling --eager             # without fusion, ROAM's models
    python -m benchmarks.scheduling --draw              # the picture alone, of the rows

Temporaries at the peak, in MiB (parameters, moments and the batch come on top): in
program order, in the best of XLA's three greedy orders, in each greedy order, and in
ours, with the bytes that no order can do without. Then the arena that holds them: by
XLA's best fit, largest and longest-lived first, and ours. "planned" are the seconds for
both, one core, without the tracing. With `--eager` every equation is an operation that
makes arrays, as ROAM counts (`eager.py`); the models are then those of its table.
Time over memory, where operations are done twice, is `benchmarks.curve`.
"""

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import jax

import jaxmem.planning as planning
from benchmarks._common import (
    MIB,
    RESULTS,
    as_a_whole,
    compiled,
    publish,
    published,
    write,
)
from benchmarks.models import zoo
from benchmarks.readings.eager import every_equation
from jaxmem.ir import jaxprs as _jaxpr
from jaxmem.ir.graph import by_shape
from jaxmem.planning import best_fit, layout
from jaxmem.scheduling.order.given import fences_of, in_given_order
from jaxmem.scheduling.predict.operations import Operations, operations_of
from jaxmem.scheduling.predict.prediction import compiled_peak

BATCHES = (1, 32)
TARGET = "h100"
SECONDS = 60.0  # for the order of a graph
PATIENCE = 3600  # seconds for a compile
DEEP = ("gpt2_large", "gpt2_xl", "llama3_8b")  # unrolled these take longer still
ROAM = (
    *("alexnet", "vgg16", "mnasnet", "mobilenet_v2", "efficientnet_b0", "vit_b"),
    *("bert_base", "gpt2_xl"),
)
GROWTH = ("gpt2_small", "gpt2_medium", "gpt2_large", "gpt2_xl")

GREEDY = {
    "program": planning.program_order,
    "XLA": planning.xla_order,
    "list": planning.list_order,
    "depth first": planning.depth_first_order,
    "least peak first": planning.least_peak_first_order,
}
ORDERS = (
    "model",
    "layers",
    "batch",
    "operations",
    *GREEDY,
    "ours",
    "bound",
    "below program %",
    "below best greedy %",
    "seconds",
)
LAYOUTS = (
    "model",
    "layers",
    "batch",
    "buffers",
    "load",
    "by size",
    "by lifetime",
    "ours",
    "above load %",
    "seconds",
)
COMPILED = (
    "model",
    "layers",
    "batch",
    "predicted",
    "compiled",
    "off %",
    "ours, predicted",
    "ours, compiled",
)


@dataclass(frozen=True)
class Case:
    """A step of the zoo."""

    model: str
    batch: int
    scanned: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """The first cells of its rows."""
        return self.model, "scanned" if self.scanned else "unrolled", str(self.batch)

    def step(self):
        return zoo.step(self.model, self.batch, self.scanned)

    def operations(self) -> tuple[Operations, planning.Graph]:
        """Its graph, the state donated, and the one without fusion."""
        step, args, _ = self.step()
        closed = jax.make_jaxpr(step)(*args)
        aliases = by_shape(closed, range(len(jax.tree.leaves(args[0]))))
        found = operations_of(closed, aliases)
        return found, every_equation(found.closed, aliases)


def cases(models: Sequence[str]):
    """Unrolled and, where there are layers, scanned."""
    for model in models:
        for scanned in (False, True) if zoo.entry(model).layered else (False,):
            for batch in BATCHES:
                yield Case(model, batch, scanned)


def ordered(case: Case, graph: planning.Graph) -> tuple[tuple, planning.Order]:
    """The row of orders, and our order."""
    peaks = {name: planning.peak(graph, make(graph)) for name, make in GREEDY.items()}
    ours = planning.order(graph, time_limit=SECONDS)
    others = peaks["program"], min(peaks["XLA"], peaks["least peak first"])
    row = (
        *case.key,
        len(graph.operations),
        *(p / MIB for p in peaks.values()),
        ours.peak / MIB,
        ours.lower_bound / MIB,
        *(100 * (1 - ours.peak / other) for other in others),
        ours.seconds,
    )
    return row, ours


def laid_out(case: Case, graph: planning.Graph, order: planning.Order) -> tuple:
    """The row of layouts of our order."""
    buffers = planning.lifetimes(graph, order.operations).buffers
    by_size, by_lifetime = (best_fit(buffers, by).height for by in ("size", "lifetime"))
    began = time.perf_counter()
    ours = layout(buffers)
    seconds = time.perf_counter() - began
    sizes = (x / MIB for x in (ours.load, by_size, by_lifetime, ours.height))
    above = 100 * (ours.height / ours.load - 1) if ours.load else 0.0
    return *case.key, len(buffers), *sizes, above, seconds


def in_compiles(case: Case, step: Operations, order: planning.Order) -> tuple:
    """What the compiler makes of it as it is, and of our order with its barriers."""
    fn, args, donate = case.step()
    how = {"target": TARGET, "what": "temp_bytes", "timeout": PATIENCE}
    plain = compiled(fn, *args, donate_argnums=donate, **how)
    fences = fences_of(step.graph, order.operations)
    closed = in_given_order(step, order.operations, fences)
    leaves, state = jax.tree.leaves(args), len(jax.tree.leaves(args[0]))
    ours = compiled(
        lambda *leaves: _jaxpr.evaluate(closed, leaves),
        *leaves,
        donate_argnums=range(state),
        **how,
    )
    found = compiled_peak(step.graph) / MIB
    off = "" if isinstance(plain, str) else 100 * (found / plain - 1)
    return *case.key, found, plain, off, order.peak / MIB, ours


def add(name: str, columns: Sequence[str], row: Sequence[Any]) -> None:
    """Puts a row among those that are published, in the zoo's order; they are kept."""
    print(*row, flush=True)
    found = {tuple(old[:3]): old for old in [*published(name), row]}
    every = (case.key for case in cases(list(zoo.ZOO)))
    write(name, columns, [found[key] for key in every if key in found])


def summary(rows: Sequence[Sequence[Any]]) -> None:
    """ROAM's two margins, over the unrolled training steps, and what there is to gain.

    No order can be further below than the bound is.
    """
    of = lambda row, name: float(row[ORDERS.index(name)])
    unrolled = [row for row in rows if row[1] == "unrolled"]
    for names, column, threshold in (
        (("program",), "below program %", 35),
        (("XLA", "least peak first"), "below best greedy %", 13),
    ):
        mean = fmean(of(row, column) for row in unrolled)
        most = fmean(
            100 * (1 - of(row, "bound") / min(of(row, name) for name in names))
            for row in unrolled
        )
        print(
            f"{column}: {mean:.1f} on average over {len(unrolled)} "
            f"(asked: {threshold}; at most {most:.1f}, by the bounds)"
        )


def draw(orders: Sequence[Sequence[Any]], layouts: Sequence[Sequence[Any]]) -> None:
    """Planning time over graph size, from GPT-2 small to XL."""
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(6, 4))
    for rows, label in ((orders, "order"), (layouts, "layout")):
        size = ORDERS.index("operations")
        found = {tuple(row[:3]): row for row in rows}
        sizes = {tuple(row[:3]): int(row[size]) for row in orders}
        for batch, marker in zip(BATCHES, "os", strict=True):
            keys = [Case(model, batch).key for model in GROWTH]
            points = [(sizes[k], float(found[k][-1])) for k in keys if k in found]
            if points:
                name = f"{label}, batch {batch}"
                ax.plot(*zip(*points, strict=True), marker=marker, label=name)
    ax.set(xlabel="operations", ylabel="seconds", ylim=(0, None), xlim=(0, None))
    ax.set_title("Planning GPT-2 small, medium, large, XL: unrolled, Adam")
    ax.legend()
    figure.tight_layout()
    path = RESULTS / f"scheduling-jax{jax.__version__}.png"
    figure.savefig(path, dpi=120)
    print(f"wrote {path.relative_to(RESULTS.parent.parent)}")


def eager(chosen: Iterable[Case]) -> None:
    """The table of orders without fusion."""
    for case in chosen:
        _, graph = case.operations()
        add("scheduling_eager", ORDERS, ordered(case, graph)[0])
    rows = published("scheduling_eager")
    publish("scheduling_eager", ORDERS, rows)
    summary(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(zoo.ZOO)}; all")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--draw", action="store_true")
    chosen = parser.parse_args()
    as_a_whole()
    if chosen.eager:
        eager([case for case in cases(chosen.models or ROAM) if not case.scanned])
        return
    for case in [] if chosen.draw else cases(chosen.models or list(zoo.ZOO)):
        step, _ = case.operations()
        row, order = ordered(case, step.graph)
        add("scheduling_order", ORDERS, row)
        add("scheduling_layout", LAYOUTS, laid_out(case, step.graph, order))
        if chosen.compile and (case.scanned or case.model not in DEEP):
            add("scheduling_h100", COMPILED, in_compiles(case, step, order))
    orders, layouts = published("scheduling_order"), published("scheduling_layout")
    publish("scheduling_order", ORDERS, orders)
    summary(orders)
    publish("scheduling_layout", LAYOUTS, layouts)
    draw(orders, layouts)


if __name__ == "__main__":
    main()
