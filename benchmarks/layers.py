"""Temp bytes and time of eight-layer scans, stock layers and ours, on absent chips.

    python -m benchmarks.layers
    python -m benchmarks.layers dot_product    # rows that have it; others stay

"predicted ms" is `report.seconds`. Where a layer has a threshold in the column "at
most", it is held to it.
"""

import sys
from collections import defaultdict
from functools import partial

import flax.linen as nn
import jax

import jaxmem
from benchmarks._common import (
    TARGETS,
    publish_some,
    result_of,
    size_and_ms,
)
from benchmarks.models import scans
from jaxmem import ops

# The gradient of the weights; for the MLP that of its input too.
WANTED = defaultdict(int, {"mlp": (0, 1)})


def flax_layer_norm(x, scale, bias):
    module = nn.LayerNorm(dtype=x.dtype)
    return module.apply({"params": {"scale": scale, "bias": bias}}, x)


def flax_attention(q, k, v, key, rate=0.1):
    return nn.dot_product_attention(
        q, k, v, dropout_rng=key, dropout_rate=rate, broadcast_dropout=False
    )


def lean_attention(q, k, v, key, rate=0.1):
    return ops.dot_product_attention(q, k, v, dropout_rate=rate, dropout_rng=key)


def cases():
    """(stack, variant, loss and arguments, thresholds for H100 and TPU v5e in MiB)."""
    for name, act, thresholds in (
        ("jax.nn.gelu", jax.nn.gelu, None),
        ("gelu, save=input", partial(ops.gelu, save="input"), (650, 515)),
        ("gelu, save=output", partial(ops.gelu, save="output"), (424, 324)),
        ("jax.nn.silu", jax.nn.silu, None),
        ("silu, save=output", partial(ops.silu, save="output"), None),
        ("jax.nn.relu", jax.nn.relu, None),
        ("relu", ops.relu, None),
    ):
        yield "mlp", name, scans.mlp(act), thresholds
    for name, norm, thresholds in (
        ("flax.linen.LayerNorm", flax_layer_norm, None),
        ("layer_norm, save=input", ops.layer_norm, None),
        (
            "layer_norm, save=output",
            partial(ops.layer_norm, save="output"),
            (424, 262),
        ),
    ):
        yield "pre-norm", name, scans.pre_norm(norm), thresholds
    checkpointed = jax.checkpoint(flax_attention)
    long = dict(layers=1, batch=1, length=4096)
    for name, attend, thresholds, long_thresholds in (
        ("flax.linen, dropout 0.1", flax_attention, None, None),
        ("the same in jax.checkpoint", checkpointed, None, None),
        ("dot_product_attention", lean_attention, (512, 400), (160, 16)),
    ):
        yield "attention, B 8 S 512", name, scans.attention(attend), thresholds
        yield (
            "attention, B 1 S 4096, one layer",
            name,
            scans.attention(attend, **long),
            long_thresholds,
        )


def taken(stack: str, loss, args, target: str) -> tuple[float, float]:
    """MiB of temporaries, and predicted ms."""
    step = jax.grad(loss, argnums=WANTED[stack])
    return size_and_ms(jaxmem.estimate(step, *args, target=target))


def row(stack: str, loss, args, threshold: int | None, target: str) -> tuple:
    size, ms = taken(stack, loss, args, target)
    return size, ms, threshold or "", result_of(size, threshold)


def main() -> None:
    rows = {
        (stack, name, target): partial(
            row, stack, *made, thresholds and thresholds[i], target
        )
        for stack, name, made, thresholds in cases()
        for i, target in enumerate(TARGETS)
    }
    columns = ("stack", "layer", "target", "temp MiB", "predicted ms", "at most", "met")
    publish_some("layers", columns, rows, sys.argv[1:])


if __name__ == "__main__":
    main()
