"""Predicted seconds of steps on this machine's CPU beside those that it takes.

    python -m benchmarks.cpu_seconds

The rates of the machine come from single operations that are timed first: a product, a
sum over large arrays, polynomials, exponentials, a loop of small operations. From these
and the text of each compiled step its seconds are predicted as for any chip, and the
steps are timed in turn. Nothing is fitted to the steps. The machine should be idle.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._common import MIB, publish
from benchmarks.cpu import MODELS, TX, Way, arguments, step_of
from benchmarks.models.transformers import Stack, mean_square
from benchmarks.time import rank_correlation
from jaxmem.chips import Rates, rates_of
from jaxmem.memory.buffers import parse_hlo
from jaxmem.memory.time.schedule import timed, total

ROUNDS = 7
COLUMNS = ("step", "measured ms", "predicted ms", "ratio")
F32 = jnp.float32

# -- the machine


def took(fn: Callable, *args, times: int = 5) -> float:
    """Seconds of a compiled function, the shortest of some runs."""
    run = jax.jit(fn)
    once(run, *args)
    return min(once(run, *args) for _ in range(times))


def once(run: Callable, *args) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    jax.block_until_ready(run(*args))
    return time.perf_counter() - start


def polynomial(x):
    """64 multiplications and additions an element."""
    for k in range(64):
        x = x * 0.5 + float(k)
    return x


def small_operations(x):
    """8,000 operations on 64 numbers, each of which needs the one before."""

    def step(x, _):
        for _ in range(4):  # a sum over them is not fused with what follows
            x = x - jnp.cumsum(x)
        return x, None

    return jax.lax.scan(step, x, None, 1000)[0]


def rates() -> Rates:
    """What this machine reaches, as single operations show it."""
    side, count = 1024, 8 * MIB
    square, vector = jnp.ones((side, side), F32), jnp.ones(count, F32)
    wide = 2 * side**3 / took(jnp.matmul, square, square)
    moved = took(jnp.add, vector, vector)
    bandwidth = 3 * 4 * count / moved
    arithmetic = took(polynomial, vector)
    special = max(took(lambda x: jnp.exp(x) + 1, vector) - 2 / 3 * moved, moved / 10)
    launch = took(small_operations, jnp.ones(64, F32)) / 8000
    return dataclasses.replace(
        rates_of("cpu"),
        clock=1e9,
        narrow=wide,
        wide=wide,
        bandwidth=bandwidth,
        cached=bandwidth,
        floating=128 * count / arithmetic,
        integer=128 * count / arithmetic,
        special=count / special,
        launch=launch,
        branch=launch,
        packing=math.inf,
        host=bandwidth,
        link=math.inf,
        tiles=((16, 16),),
    )


# -- the steps


def gradient_step(loss: Callable) -> Callable:
    def step(params, *args):
        grads = jax.grad(loss)(params, *args)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)

    return step


def convolutions(kernels, x):
    for kernel in kernels:
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=numbers
        )
        x = jax.nn.relu(x)
    return jnp.mean(x**2)


def recurrent(weights, x):
    def cell(state, now):
        gates = jnp.concatenate([now, state], axis=-1) @ weights
        one, two = jnp.split(gates, 2, axis=-1)
        state = jax.nn.sigmoid(one) * state + jnp.tanh(two)
        return state, None

    return jnp.mean(jax.lax.scan(cell, jnp.zeros_like(x[0]), x)[0] ** 2)


def words(tables, x, labels):
    logits = tables["in"][x] @ tables["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def dense(weights, x):
    for w in weights:
        x = jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def others() -> Iterator[tuple[str, Callable, tuple]]:
    """Steps that are no transformers: (name, step, arguments)."""
    drawn = lambda *shape: jax.random.normal(jax.random.key(len(shape)), shape, F32)
    kernels = [drawn(3, 3, *io) for io in ((3, 32), (32, 32), (32, 64))]
    step = gradient_step(convolutions)
    yield "3 convolutions, 16 x 64 x 64", step, (kernels, drawn(16, 64, 64, 3))
    step = gradient_step(recurrent)
    yield "a gated cell, 128 steps", step, (drawn(512, 512), drawn(128, 32, 256))
    tables = {"in": drawn(8192, 256), "out": drawn(256, 8192)}
    ids = jnp.arange(1024, dtype=jnp.int32)
    yield "8,192 words, 1,024 tokens", gradient_step(words), (tables, ids, ids[::-1])
    args = [drawn(1024, 1024)] * 4, drawn(256, 1024)
    yield "4 dense layers, 256 x 1,024", gradient_step(dense), args


def transformers() -> Iterator[tuple[str, Callable, tuple]]:
    """Layers of GPT-2, BERT and Llama, as they are and by each measure."""
    for name, model in MODELS.items():
        stack = Stack(model.config, model.layer)
        ways = {
            "plain": stack,
            "jax.checkpoint": Stack(model.config, nn.remat(model.layer)),
            "substitute": jaxmem.substitute(stack),
        }
        for way, module in ways.items():
            step = step_of(mean_square(module))
            yield f"{name}, {way}", step, arguments(model, Way(step, TX))


# -- both


def measured(runs: Mapping[str, tuple[Any, tuple]]) -> dict[str, float]:
    """Name of a step -> seconds, the median of rounds in which all have their turn."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(-1, ROUNDS):  # one to warm up
        for name, (run, args) in runs.items():
            spent = once(run, *args)
            if k >= 0:
                seconds[name].append(spent)
    return {name: statistics.median(times) for name, times in seconds.items()}


def compared() -> list[tuple[str, float, float]]:
    """(step, measured, predicted seconds)."""
    machine = rates()
    runs, said = {}, {}
    for name, step, args in (*transformers(), *others()):
        compiled = jax.jit(step).lower(*args).compile()
        runs[name] = compiled, args
        said[name] = total(timed(parse_hlo(compiled.as_text()), machine).kernels)
    return [(name, one, said[name]) for name, one in measured(runs).items()]


def rows(found: Sequence[tuple[str, float, float]]) -> Iterator[tuple]:
    for name, one, said in found:
        yield name, f"{1e3 * one:.1f}", f"{1e3 * said:.1f}", f"{said / one:.2f}"
    middle = statistics.median(said / one for _, one, said in found)
    ranked = rank_correlation(*zip(*(of[1:] for of in found), strict=True))
    yield "median ratio", "", "", f"{middle:.2f}"
    yield "rank correlation", "", "", f"{ranked:.2f}"


if __name__ == "__main__":
    publish("cpu_seconds", COLUMNS, list(rows(compared())))
