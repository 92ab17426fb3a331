"""Full-size models that others wrote: the largest batch on a T4, an L4 and an H100.

    python -m benchmarks.foreign_batches [library/model ...] [--chip CHIP ...]
    python -m benchmarks.foreign_batches --budget [library/model ...] [--chip CHIP ...]

An Adam step, state donated, compiled for the chip: the largest batch in its memory, as
the library has the model and substituted. XLA for GPUs recomputes by itself where a
step would not fit the chip; "as written" is with that switched off. With `--budget`
also twice the largest batch, with the chip's memory as the budget of `jaxmem.schedule`:
the peak, and what is recomputed; such a search takes minutes. Only shapes are there, no
weights. The models are those of `foreign_published.py`; it needs the extra `foreign`.

A row is written as soon as it is measured; those of this commit are skipped, and what
was compiled once is remembered. Several commands may run side by side.

Peaks are nearly linear in the batch. A batch that is named was compiled and fits; that
the next one does not is compiled as well, or follows from the line through two compiled
peaks. From 32 on batches are multiples of 2, from 64 on of 4, and so on.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import jax

import jaxmem
from benchmarks._common import commit, publish, published, write
from benchmarks.blocks import matmul_flops
from benchmarks.foreign_models import KEY, Loss, state, train_step
from benchmarks.foreign_published import BF16, MODELS, Published
from benchmarks.peaks import GIB, Peaks, bytes_of
from jaxmem.chips import get_target
from jaxmem.scheduling import BudgetError

CHIPS = ("h100", "l4", "t4")
COLUMNS = (
    *("library", "model", "an example", "chip", "dtype", "memory (GiB)", "state (GiB)"),
    *("plain", "substituted", "of plain"),
    *("plain, as written", "substituted, as written", "of plain, as written"),
    *("scheduled", "peak (GiB)", "recomputed (%)"),
)
SEARCH = 900.0  # seconds in which `schedule` takes what fits
AS_WRITTEN = {"xla_disable_hlo_passes": "rematerialization"}


@dataclass(frozen=True)
class Way:
    """A step, compiled as XLA does by itself, and with its recomputation off."""

    free: Peaks
    held: Peaks


def steps_of(model: Published, dtype: str) -> tuple[Way, Way]:
    """The plain and the substituted step, over batches of shapes."""
    built = model.build(dtype)
    held = jax.eval_shape(lambda: state(built))

    def args(batch: int) -> tuple:
        sized = lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)
        return held, jax.tree.map(sized, built.batch), KEY

    def way(loss: Loss) -> Way:
        step = train_step(loss)
        return Way(Peaks(step, args), Peaks(step, args, AS_WRITTEN))

    return way(built.loss), way(built.lean)


def batches(plain: Way, lean: Way, chip: str) -> list:
    """The bytes there are, those of the state, and the largest batches in the rest."""
    room = get_target(chip).memory_bytes
    state_bytes = bytes_of(plain.free.args(0))
    if state_bytes > room:
        return [room / GIB, state_bytes / GIB, 0, 0, "", 0, 0, ""]
    free = [way.free.largest(chip, room) for way in (plain, lean)]
    held = [
        way.held.largest(chip, room, n) if n else 0
        for way, n in zip((plain, lean), free, strict=True)
    ]
    return [room / GIB, state_bytes / GIB, *free, of(*free), *held, of(*held)]


def of(plain: int, lean: int) -> str:
    return f"{lean / plain:.2f}" if plain else ""


def within_budget(plain: Way, lean: Way, chip: str, largest: int) -> list:
    """Twice that batch in the chip's memory: the peak, and what is recomputed."""
    room = get_target(chip).memory_bytes
    args = lean.free.args
    if bytes_of(args(0)) > room:
        return ["does not fit", "", ""]
    batch = max(1, 2 * largest)
    how = {"target": chip, "donate_argnums": 0, "search_seconds": SEARCH}
    try:
        plan = jaxmem.schedule(lean.free.step, room, **how).plan(*args(batch))
    except (BudgetError, TimeoutError) as error:
        print(" ", error)
        return [f"not {batch}", "", ""]
    forward = matmul_flops(plain.free.step, *args(batch)) / 3
    recomputed = f"{100 * plan.recomputed_flops / forward:.1f}"
    return [batch, plan.scheduled.peak_bytes / GIB, recomputed]


def dtype_of(model: Published, chip: str) -> str:
    """A T4 has no bfloat16."""
    return "float16" if chip == "t4" and model.dtype == BF16 else model.dtype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", metavar="library/model")
    parser.add_argument("--chip", nargs="*", default=CHIPS, choices=CHIPS)
    parser.add_argument("--budget", action="store_true")
    asked = parser.parse_args()
    if wrong := set(asked.models) - set(MODELS):
        raise SystemExit(f"{', '.join(wrong)}: one of {', '.join(MODELS)}")
    sys.argv[1:] = []  # the file is that of all rows
    for name in asked.models or MODELS:
        measure(MODELS[name], asked.chip, asked.budget)
    publish("foreign_batches", COLUMNS, in_order(rows_there()))


def measure(model: Published, chips: Sequence[str], budget: bool) -> None:
    """The rows of a model that this commit has not; each is written at once."""
    made: dict[str, tuple[Way, Way]] = {}
    for chip in chips:
        key, dtype = (model.library, model.name, chip), dtype_of(model, chip)
        if complete(rows_there().get(key), budget):
            continue
        if dtype not in made:
            made[dtype] = steps_of(model, dtype)
        found = batches(*made[dtype], chip)
        more = within_budget(*made[dtype], chip, found[3]) if budget else ["", "", ""]
        first = [model.library, model.name, model.example, chip, dtype]
        row = [*first, *found, *more]
        print(*row, flush=True)
        write("foreign_batches", COLUMNS, in_order(rows_there() | {key: row}))


def complete(row: Sequence | None, budget: bool) -> bool:
    """Whether a row is of this commit, and has what is asked for."""
    if row is None or getattr(row, "commit", None) != commit():
        return False
    return not budget or bool(row[COLUMNS.index("scheduled")])


def rows_there() -> dict[tuple[str, ...], Sequence]:
    """By library, model and chip."""
    return {(*row[:2], row[3]): row for row in published("foreign_batches")}


def in_order(rows: dict) -> list:
    """The rows there are, by model and chip."""
    every = [(m.library, m.name, chip) for m in MODELS.values() for chip in CHIPS]
    return [rows[key] for key in every if key in rows]


if __name__ == "__main__":
    main()
