"""What a step takes when its largest regions run in tiles, and what that costs.

    python -m benchmarks.tiles                            # every row
    python -m benchmarks.tiles "head, float32" least      # rows that have both words
    python -m benchmarks.tiles --budgets Llama            # rows of the other tables
    python -m benchmarks.tiles --collectives
    python -m benchmarks.tiles --picture

The steps of `benchmarks.steps.tiles`, compiled for the chip that the row names; nothing
in them asks for tiles. "remat" has `jax.checkpoint` around each layer, "by hand" loops
over the examples in each layer and around the head. "least" is what `jaxmem.schedule`
reaches, "whole" the same with `tile=False`; "n tiles" is that number in every region,
without a search, and with nothing recomputed unless the row says so. "predicted ms" is
`report.seconds`. Matmul flops are those of the jaxpr, all iterations counted; "seconds"
those of the search, or of the one compile.
"""

import argparse
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks._common import publish_some, result_of
from benchmarks._pictures import IMAGES
from benchmarks.before_after import draw
from benchmarks.steps import tile_ways as ways
from benchmarks.steps.tiles import (
    BERT,
    HEAD_BF16,
    HEAD_F32,
    LLAMA,
    LLAMA_TPU,
    LONG_FOUR,
    LONG_ONE,
    SHARDINGS,
    STACKS,
    STEPS,
)
from jaxmem.memory.buffers import KINDS
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.tiling.tiles import Tiles

H100, V5E = "h100", "tpu-v5e"
PICTURE = IMAGES / "tiles.svg"
COLUMNS = (
    *("step", "how", "target", "temp MiB", "peak MiB", "predicted ms", "matmul TF"),
    *("tiles", "compiles", "seconds", "at most", "met"),
)


class Case(NamedTuple):
    """A row.

    Attributes:
      how: of `tile_ways.WAYS`, with its argument in front if it has one.
      at_most: MiB of temporaries; None for a row to compare with.
    """

    step: str
    how: str
    target: str = H100
    at_most: int | None = None


def cases() -> Iterator[Case]:
    for how in ("plain", "remat", "schedule", "remat, schedule", "by hand, schedule"):
        yield Case(LLAMA, how)
    yield Case(LLAMA, "8 tiles, recomputed", at_most=3300)
    yield Case(LLAMA, "32 tiles, recomputed", at_most=3300)
    yield Case(LLAMA, "whole")
    yield Case(LLAMA, "3300 MiB", at_most=3300)
    yield Case(LLAMA, "least", at_most=2900)
    for how in ("remat, schedule", "by hand, schedule"):
        yield Case(LLAMA_TPU, how, V5E)
    yield Case(LLAMA_TPU, "8 tiles, recomputed", V5E, 2300)
    yield Case(LLAMA_TPU, "least", V5E, 2300)
    for step, eight, many in ((HEAD_F32, 1810, 1220), (HEAD_BF16, 2320, 2120)):
        yield Case(step, "plain")
        yield Case(step, "8 tiles", at_most=eight)
        yield Case(step, "32 tiles", at_most=many)
        yield Case(step, "least", at_most=250)
    for step, half in zip(STACKS, (239, 280, 1223), strict=True):
        yield Case(step, "plain")
        yield Case(step, "whole")
        yield Case(step, "least", at_most=half)
    yield Case(BERT, "plain")
    yield Case(BERT, "schedule")
    yield Case(BERT, "microbatch")
    yield Case(BERT, "12500 MiB", at_most=12_500)  # 16 GiB with its state
    for step in (LONG_ONE, LONG_FOUR):
        yield Case(step, "plain")
        yield Case(step, "remat")
        yield Case(step, "40960 MiB", at_most=40_960)
    for way in SHARDINGS:
        for how in ("plain", "remat, schedule", "least"):
            yield Case(f"8 devices, {way}", how)


def row(case: Case) -> tuple:
    cells = ways.measured(case.step, case.how, case.target)
    return *cells, case.at_most or "", result_of(cells[0], case.at_most)


def memory(words: Sequence[str]) -> None:
    rows = {case[:3]: functools.partial(row, case) for case in cases()}
    publish_some("tiles", COLUMNS, rows, words)


# -- what is still recomputed within a budget, in per cent of the forward pass

# (model, MiB of temporaries) -> what is recomputed without tiles
BUDGETS = {
    (STACKS[2], 5817): 6.1,
    (STACKS[2], 3196): 66.7,
    (STACKS[1], 2480): 11.6,
    (STACKS[0], 2285): 7.6,
    (STACKS[0], 615): 98.6,
}


def budget_row(model: str, temp: int, whole: float) -> tuple:
    cells = ways.recomputed(model, H100, temp)
    return *cells, whole, result_of(cells[2], whole / 2)


def budgets(words: Sequence[str]) -> None:
    rows = {
        (model, str(temp)): functools.partial(budget_row, model, temp, whole)
        for (model, temp), whole in BUDGETS.items()
    }
    columns = ("model", "budget MiB", "temp MiB", "predicted ms", "recomputes %")
    columns += ("tiles", "compiles", "seconds", "without tiles %", "half or less")
    publish_some("tiles_budget", columns, rows, words)


# -- what eight devices send each other


def collectives(words: Sequence[str]) -> None:
    rows = {
        (way, how): functools.partial(ways.sent, f"8 devices, {way}", how, H100)
        for way in SHARDINGS
        for how in ("plain", "remat, schedule", "least")
    }
    kinds = (f"{kind} MiB" for kind in KINDS)
    columns = ("sharding", "how", *kinds, "of these in tiles MiB", "temp MiB")
    publish_some("tiles_collectives", columns, rows, words)


def picture() -> None:
    """Of the Llama-like step: what JAX has for it, and 32 tiles."""
    made = STEPS[LLAMA]("remat")
    choice = Choice(H100, (Recompute(1e-3), Tiles(limit=0, n=32)))
    plain = STEPS[LLAMA]("plain")
    tiled, _ = ways.in_tiles(plain, choice)
    reports = {
        "jax.checkpoint around each layer": ways.report_of(made.step, made, H100),
        "unmodified, in tiles with jaxmem": ways.report_of(tiled, plain, H100),
    }
    draw(reports, PICTURE)
    print(f"wrote {PICTURE.relative_to(PICTURE.parent.parent.parent)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    for table in ("budgets", "collectives", "picture"):
        parser.add_argument(f"--{table}", action="store_true")
    chosen = parser.parse_args()
    if chosen.picture:
        picture()
    elif chosen.budgets:
        budgets(chosen.words)
    elif chosen.collectives:
        collectives(chosen.words)
    else:
        memory(chosen.words)


if __name__ == "__main__":
    main()
