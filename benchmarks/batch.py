"""BERT-Large and Adam, 512 tokens: the largest batch in 16 GiB, and its throughput.

    python -m benchmarks.batch           # batches, compiled for an H100
    python -m benchmarks.batch --time    # on a GPU: step times as well, at 8 and there

"plain" is the model as it is; "substituted" goes through `jaxmem.substitute`, "kernels"
takes the Pallas kernels besides, "schedule" releases gradients. All compute the same.
Published for Tempo (https://arxiv.org/abs/2210.10246, section 5): twice the batch and
1.16 times the throughput of plain on 16 GB.
"""

import argparse
import contextlib
import csv
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

import jaxmem
from benchmarks._common import publish
from benchmarks.kernels import chip, milliseconds
from benchmarks.models.transformers import Bert, BertConfig
from benchmarks.release import KEY, adam_step
from benchmarks.steps.kernels import filled
from pallas_kernels import dispatch
from pallas_kernels.chips import GPUS, TPUS

MEMORY = "16GiB"
SMALL = 8
BERT_LARGE = BertConfig()
TARGET = "h100"
CHIPS = (*GPUS, *TPUS)
DTYPES = ("float32", "bfloat16", "float16")
KERNELS = (
    *("attention", "layer_norm", "rms_norm", "gelu", "silu"),
    *("dropout_add_layer_norm", "dropout_add_rms_norm", "linear_cross_entropy"),
)
COLUMNS = (
    *("step", "largest batch", "of plain"),
    *("predicted sequences a second", "of plain"),
    *(f"ms at {SMALL}", "of plain", "sequences a second", "of plain"),
)


@contextlib.contextmanager
def kernels_taken(wanted: bool) -> Iterator[None]:
    """`implementation=None` takes every kernel, or XLA alone."""
    before = dispatch.MEASURED
    kinds = itertools.product(KERNELS, CHIPS, DTYPES, (0,), (False, True))
    every = tuple(dispatch.Measured(*kind) for kind in kinds)
    dispatch.MEASURED = every if wanted else ()
    try:
        yield
    finally:
        dispatch.MEASURED = before


def step_of(how: str, config=BERT_LARGE, **options) -> tuple[Callable, Any]:
    """A train step, and its state; options are those of `jaxmem.schedule`."""
    model = Bert(config)
    model = jaxmem.substitute(model) if "substituted" in how else model
    step, (state, *_) = adam_step(model)
    if "schedule" in how:
        return jaxmem.schedule(step, donate_argnums=0, **options), state
    return jax.jit(step, donate_argnums=0), state


def arguments(state, batch: int) -> tuple:
    return state, jax.ShapeDtypeStruct((batch, 512), "int32"), KEY


def timed(step: Callable, state, batch: int) -> float:
    """Milliseconds of a step."""
    args = filled(arguments(state, batch))
    return milliseconds(lambda *args: step(*args)[:1], args, (0,))


def measured(how: str, on_device: bool) -> list[float]:
    """The largest batch, and its sequences a second, predicted.

    On a device milliseconds at `SMALL` as well, and sequences a second at the largest.
    """
    step, state = step_of(how)
    with kernels_taken("kernels" in how):
        make = lambda batch: arguments(state, batch)
        largest = jaxmem.max_batch(step, make, TARGET, MEMORY)
        found = [int(largest), largest.per_second]
        if not on_device:
            return found
        rate = 1e3 * largest / timed(step, state, largest)
        return [*found, timed(step, state, SMALL), rate]


def rows_of(path: pathlib.Path) -> dict[str, str]:
    """The largest batch of each step, as a file has it."""
    lines = [x for x in path.read_text().splitlines() if not x.startswith("#")]
    return {row["step"]: row["largest batch"] for row in csv.DictReader(lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--time", action="store_true")
    on_device = parser.parse_args().time
    variants = ("plain", "substituted", "substituted, kernels", "substituted, schedule")
    rows: list[list] = []
    for how in (*variants, "substituted, kernels, schedule"):
        found = measured(how, on_device)
        first = rows[0][1::2] if rows else found
        ratios = [x / y for x, y in zip(found, first, strict=False)]
        pairs = [x for pair in zip(found, ratios, strict=True) for x in pair]
        rows.append([how, *pairs, *[""] * (len(COLUMNS) - 1 - len(pairs))])
        print(*rows[-1], flush=True)
    publish(f"batch-{chip()}" if on_device else "batch", COLUMNS, rows)


if __name__ == "__main__":
    main()
