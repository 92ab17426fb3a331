"""Full-size models that others wrote: the largest batch on a T4, an L4 and an H100.

    python -m benchmarks.foreign_batches [library/model ...] [--chip CHIP ...]
                                         [--scheduled] [--anew]

An Adam step, state donated, compiled for the chip: the largest batch in its memory, as
the library has the model and substituted, and with `--scheduled` substituted and
scheduled with the chip's memory as the budget, which takes some minutes for each batch.
XLA for GPUs recomputes by itself where a step would not fit the chip. Only shapes are
there, no weights. The models are those of `foreign_published.py`; it needs the extra
`foreign`.

A row is written as soon as it is measured. Those that this jaxmem has given are
skipped, unless `--anew`. What was compiled once is remembered. Several commands may run
side by side.

Peaks are nearly linear in the batch. A batch that is named was compiled and fits; that
the next one does not is compiled as well, or follows from the line through two compiled
peaks; so are two beyond it, which may fit because XLA recomputes by itself. From 32 on
batches are multiples of 2, from 64 on of 4, and so on.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

import jax

import jaxmem
from benchmarks._common import Row, publish, published, same_library, write
from benchmarks.models.foreign import KEY, state, train_step
from benchmarks.models.foreign_published import BF16, MODELS, Published
from benchmarks.readings.peaks import GIB, Peaks, bytes_of
from jaxmem.chips import get_target

FILE = "foreign_batches"
CHIPS = ("h100", "l4", "t4")
COLUMNS = (
    *("library", "model", "an example", "chip", "dtype", "memory (GiB)", "state (GiB)"),
    *("plain", "substituted", "scheduled", "of plain"),
)
BATCHES = slice(COLUMNS.index("plain"), COLUMNS.index("substituted") + 1)
SCHEDULED = COLUMNS.index("scheduled")
Steps = tuple[Callable, Callable, Callable[[int], tuple]]


def steps_of(model: Published, dtype: str) -> Steps:
    """The plain and the substituted step, and their arguments by batch, as shapes."""
    built = model.build(dtype)
    held = jax.eval_shape(lambda: state(built))

    def args(batch: int) -> tuple:
        sized = lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)
        return held, jax.tree.map(sized, built.batch), KEY

    return train_step(built.loss), train_step(built.lean), args


def dtype_of(model: Published, chip: str) -> str:
    """A T4 has no bfloat16."""
    return "float16" if chip == "t4" and model.dtype == BF16 else model.dtype


def largest(
    plain: Peaks,
    lean: Peaks,
    chip: str,
    before: Sequence[str] | None,
    scheduled: bool = False,
) -> list[float | int | str]:
    """The bytes there are, those of the state, and the largest batches in the rest."""
    room = get_target(chip).memory_bytes
    state_bytes = bytes_of(plain.args(0))
    if state_bytes > room:
        return [room / GIB, state_bytes / GIB, 0, 0, "", ""]
    known, near = map(int, before) if before else (None, None)
    first = plain.largest(chip, room, known)
    most = lean.largest(chip, room, near or first or None)
    last = _scheduled(lean, chip, room, most) if scheduled else ""
    of_plain = f"{max(most, last or 0) / first:.2f}" if first else ""
    return [room / GIB, state_bytes / GIB, first, most, last, of_plain]


def _scheduled(lean: Peaks, chip: str, room: int, near: int) -> int:
    """The largest batch of the substituted step scheduled; alone it has `near`."""
    how = {"target": chip, "donate_argnums": 0, "progress": False, "tile": False}
    step = jaxmem.schedule(lean.step, budget=room, **how)
    return Peaks(step, lean.args).largest(chip, room, near * 3 // 2 or None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", metavar="library/model")
    parser.add_argument("--chip", nargs="*", default=CHIPS, choices=CHIPS)
    parser.add_argument("--scheduled", action="store_true")
    parser.add_argument("--anew", action="store_true")
    asked = parser.parse_args()
    sys.argv[1:] = []  # the file is that of all rows
    for model in named(asked.models):
        measure(model, asked.chip, asked.scheduled, asked.anew)
    publish(FILE, COLUMNS, in_order(rows_there(FILE)))


def named(models: Sequence[str]) -> list[Published]:
    """All there are, where none is named."""
    if wrong := set(models) - set(MODELS):
        raise SystemExit(f"{', '.join(wrong)}: one of {', '.join(MODELS)}")
    return [MODELS[name] for name in models or MODELS]


def measure(
    model: Published, chips: Sequence[str], scheduled: bool, anew: bool
) -> None:
    """The rows of a model that this commit has not; each is written at once."""
    made: dict[str, tuple[Peaks, Peaks]] = {}
    for chip in chips:
        key, dtype = (model.library, model.name, chip), dtype_of(model, chip)
        before = rows_there(FILE).get(key)
        missing = before is None or (scheduled and not before[SCHEDULED])
        if not (missing or anew) and same_library(before.commit):
            continue
        if dtype not in made:
            plain, lean, args = steps_of(model, dtype)
            made[dtype] = Peaks(plain, args), Peaks(lean, args)
        found = largest(*made[dtype], chip, before and before[BATCHES], scheduled)
        row = [model.library, model.name, model.example, chip, dtype, *found]
        print(*row, flush=True)
        write(FILE, COLUMNS, in_order(rows_there(FILE) | {key: row}))


def publish_rows(
    file: str,
    columns: Sequence[str],
    models: Sequence[Published],
    chips: Sequence[str],
    measure: Callable[[Published, str], list],
) -> None:
    """The rows that this jaxmem has not, each written at once, then all of them."""
    for chip in chips:
        for model in models:
            key = (model.library, model.name, chip)
            there = rows_there(file).get(key)
            if there is not None and same_library(there.commit):
                continue
            row = measure(model, chip)
            print(*row, flush=True)
            write(file, columns, in_order(rows_there(file) | {key: row}))
    publish(file, columns, in_order(rows_there(file)))


def rows_there(file: str) -> dict[tuple[str, ...], Row]:
    """By library, model and chip."""
    return {(*row[:2], row[3]): row for row in published(file)}


def in_order(rows: dict) -> list:
    """The rows there are, by model and chip."""
    every = [(m.library, m.name, chip) for m in MODELS.values() for chip in CHIPS]
    return [rows[key] for key in every if key in rows]


if __name__ == "__main__":
    main()
