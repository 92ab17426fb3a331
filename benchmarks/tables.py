"""What a step over a large embedding table takes, dense and in rows.

    python -m benchmarks.tables
    python -m benchmarks.tables Adam h100    # rows that have both; others stay

A table of 1 GiB in float32, of 64 or 128 columns, bags of 8 ids for 8,192 examples, and
two dense layers, compiled for both chips with parameters and state donated. "dense" is
the step with `jax.value_and_grad`, "scheduled" the same through `jaxmem.schedule` with
the chip as its target, "rows" takes `value_and_row_grad` and the row-wise rule.
"""

import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._common import MIB, TARGETS, publish_some, size_and_ms
from benchmarks.steps.train import flat_step

NUMBERS, WIDTHS, EXAMPLES, BAG = 1 << 28, (64, 128), 8192, 8
COLUMNS = ("rule", "variant", "columns", "target", "state MiB", "temp MiB", "peak MiB")
COLUMNS += ("predicted ms",)


def loss_fn(params, ids, labels):
    x = jaxmem.ops.embedding_bag(params["table"], ids, mode="mean")
    logits = jnp.tanh(x @ params["hidden"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def variants():
    dense = jax.value_and_grad(loss_fn)
    rows = jaxmem.optim.value_and_row_grad(loss_fn, "table")
    optim = jaxmem.optim
    for rule, tx, of_rows in (
        ("SGD", optax.sgd(0.1), optim.rowwise_sgd(0.1)),
        ("Adagrad", optax.adagrad(0.05), optim.rowwise(optax.adagrad(0.05))),
        ("Adam", optax.adam(1e-3), optim.lazy_adam(1e-3)),
    ):
        step = flat_step(dense, tx)
        yield rule, "dense", tx, step
        if rule != "Adam":  # every row moves: the pass leaves it as it is
            yield rule, "scheduled", tx, step
        yield rule, "rows", of_rows, flat_step(rows, of_rows)


def measure(step: Callable, variant: str, tx, width: int, target: str):
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    params = {"table": f32(NUMBERS // width, width), "head": f32(256, 2)}
    params["hidden"] = f32(width, 256)
    args = params, jax.eval_shape(tx.init, params), i32(EXAMPLES, BAG), i32(EXAMPLES)
    donated = {"donate_argnums": (0, 1)}
    if variant == "scheduled":
        step, donated = jaxmem.schedule(step, target=target, **donated), {}
    report = jaxmem.estimate(step, *args, target=target, **donated)
    sizes = report.argument_bytes / MIB, report.temp_bytes / MIB
    return *sizes, *size_and_ms(report, "peak_bytes")


def main() -> None:
    cases = {
        (rule, variant, str(width), target): functools.partial(
            measure, step, variant, tx, width, target
        )
        for rule, variant, tx, step in variants()
        for width in WIDTHS
        for target in TARGETS
    }
    publish_some("tables", COLUMNS, cases, sys.argv[1:])


if __name__ == "__main__":
    main()
