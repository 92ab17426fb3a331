"""The loss head of a large vocabulary: temp bytes on absent chips, matmul flops, time.

    python -m benchmarks.cross_entropy
    python -m benchmarks.cross_entropy kernels    # rows that have it; others stay
    python -m benchmarks.cross_entropy time

8,192 tokens, 131,072 words, 4,096 features, bfloat16: the loss, without which chunks
need no forward pass, and the gradients of x and kernel (which are outputs, not temp).
"whole logits" is the formula with float32 logits; "optax" the same by its integer-label
loss; "checkpointed chunks" a scan over 8 chunks of tokens, each in `jax.checkpoint`.
The last command times a small head on this CPU, the least of 5 runs, against whole
logits.
"""

import functools
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._common import (
    MS,
    TARGETS,
    publish,
    publish_some,
    result_of,
    size_and_ms,
)
from benchmarks.cost import matmul_flops
from jaxmem.ops import linear_cross_entropy

SDS = jax.ShapeDtypeStruct
SIZES = (8192, 4096, 131072)
THRESHOLDS = {"h100": 180, "tpu-v5e": 130}


def whole(x, kernel, labels):
    """The plain loss, by log-softmax of float32 logits."""
    log_p = jax.nn.log_softmax((x @ kernel).astype(jnp.float32))
    return -jnp.take_along_axis(log_p, labels[:, None], 1).mean()


def by_optax(x, kernel, labels):
    logits = (x @ kernel).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def chunks(x, kernel, labels, count=8):
    """Chunks of tokens, whose logits are recomputed in the backward pass."""

    @jax.checkpoint
    def chunk(total, tokens):
        x, labels = tokens
        return total + whole(x, kernel, labels) / count, None

    tokens = x.reshape(count, -1, x.shape[-1]), labels.reshape(count, -1)
    return jax.lax.scan(chunk, jnp.zeros(()), tokens)[0]


def variants():
    """(name, loss, axis of the vocabulary, whether held to the threshold)."""
    ours = linear_cross_entropy
    options = dict(label_smoothing=0.1, z_loss=1e-4, softcap=30.0, ignore_index=-100)
    tied = functools.partial(ours, vocab_axis=0)
    narrow = functools.partial(ours, accumulator_dtype=jnp.bfloat16)
    yield "whole logits", whole, 1, False
    yield "optax", by_optax, 1, False
    yield "checkpointed chunks", chunks, 1, False
    yield "linear_cross_entropy", ours, 1, True
    yield "the same, embedding table", tied, 0, True
    yield "the same, all options", functools.partial(ours, **options), 1, True
    yield "the same, bfloat16 accumulator", narrow, 1, False
    wide = functools.partial(ours, block_size=4096)
    yield "the same, blocks of 4,096 words", wide, 1, False


def kernels(x, kernel, labels):
    """By the Pallas kernels of a TPU."""
    return linear_cross_entropy(x, kernel, labels, implementation="pallas")


def arguments(vocab_axis=1, sizes=SIZES, dtype=jnp.bfloat16):
    tokens, features, words = sizes
    shape = (features, words) if vocab_axis else (words, features)
    return SDS((tokens, features), dtype), SDS(shape, dtype), SDS((tokens,), jnp.int32)


def temp_and_ms(loss, vocab_axis, target) -> tuple[float, float]:
    """MiB of temporaries of loss and gradients, and predicted ms."""
    step = jax.value_and_grad(loss, argnums=(0, 1))
    return size_and_ms(jaxmem.estimate(step, *arguments(vocab_axis), target=target))


def flops(loss, vocab_axis=1) -> int:
    step = jax.value_and_grad(loss, argnums=(0, 1))
    return matmul_flops(jax.make_jaxpr(step)(*arguments(vocab_axis)).jaxpr)


def row(loss, axis: int, held: bool, target: str) -> tuple:
    """Of the kernels no flops are counted, and no time: they are inside of calls."""
    size, ms = temp_and_ms(loss, axis, target)
    ms = "" if loss is kernels else ms  # they declare no cost
    threshold = THRESHOLDS[target] if held else None
    ratio = "" if loss is kernels else f"{flops(loss, axis) / flops(whole):.3f}"
    return size, ms, threshold or "", result_of(size, threshold), ratio


def bytes_and_flops(words: Sequence[str]) -> None:
    rows = {
        (name, target): functools.partial(row, *variant, target)
        for name, *variant in variants()
        for target in TARGETS
    }
    by_kernels = functools.partial(row, kernels, 1, False, "tpu-v5e")
    rows["the same, kernels", "tpu-v5e"] = by_kernels
    columns = ("loss", "target", "temp MiB", MS, "at most", "met")
    publish_some("cross_entropy", (*columns, "matmul flops, ratio"), rows, words)


def seconds(step, args) -> float:
    jax.block_until_ready(step(*args))
    runs = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(step(*args))
        runs.append(time.perf_counter() - start)
    return min(runs)


def on_this_cpu(sizes=(1024, 256, 8192)) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    rows, plain = [], None
    for name, loss, axis, _ in variants():
        x, kernel, labels = arguments(axis, sizes, jnp.float32)
        args = (
            jax.random.normal(keys[0], x.shape),
            jax.random.normal(keys[1], kernel.shape) / sizes[1] ** 0.5,
            jax.random.randint(keys[2], labels.shape, 0, sizes[2]),
        )
        took = seconds(jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), args)
        plain = plain or took
        rows.append((name, "x".join(map(str, sizes)), took, f"{took / plain:.2f}"))
    publish("cross_entropy_time", ("loss", "sizes", "seconds", "ratio"), rows)


if __name__ == "__main__":
    on_this_cpu() if sys.argv[1:] == ["time"] else bytes_and_flops(sys.argv[1:])
