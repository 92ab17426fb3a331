"""Seconds and bytes of a training step on this machine's CPU, by how it is written.

    python -m benchmarks.cpu

Three models that are small enough for two cores, float32, AdamW, layers in `nn.scan`.
Every round runs every way once, each time beginning with another one; a row has the
median of the rounds, their quartiles, and the median of the ratios to "plain" (of
micro-batches: to those added up by hand) within a round. The machine should be idle.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._common import MIB, publish
from benchmarks.models.transformers import (
    BertConfig,
    Layer,
    LlamaLayer,
    PreLNLayer,
    Stack,
    StackConfig,
    mean_square,
)
from benchmarks.steps.train import flat_step

ROUNDS, PARTS, TIGHT = 15, 4, 0.7
TX = optax.adamw(1e-4)
F32 = jnp.float32
COLUMNS = (
    *("model", "way", "seconds", "first quartile", "third quartile", "ratio"),
    *("peak MiB", "rounds"),
)


class Model(NamedTuple):
    """A stack of layers, and the examples and positions of a batch."""

    layer: type[nn.Module]
    config: Any
    shape: tuple[int, int]


MODELS: Mapping[str, Model] = {
    "8 layers of GPT-2, 256 wide, 8 x 256": Model(
        PreLNLayer, StackConfig(8, 256, 4, 4, 1024, dtype=F32), (8, 256)
    ),
    "8 layers of BERT, 256 wide, 8 x 256": Model(
        Layer, BertConfig(8, 256, 4, 1024, dtype=F32), (8, 256)
    ),
    "8 layers of Llama, 256 wide, 8 x 256": Model(
        LlamaLayer, StackConfig(8, 256, 8, 2, 768, 0.0, dtype=F32), (8, 256)
    ),
}


class Way(NamedTuple):
    """A step that is called with (params, state, batch, key), and its own state."""

    step: Callable
    tx: Any


def step_of(loss: Callable) -> Callable:
    return flat_step(jax.value_and_grad(loss), TX)


def added_up(loss: Callable) -> Callable:
    """Gradients of micro-batches added up in a `lax.scan`, as most JAX code has it."""

    def step(params, state, x, key):
        def add(total, batch):
            value, grads = jax.value_and_grad(loss)(params, *batch)
            return jax.tree.map(lambda t, g: t + g / PARTS, total, grads), value

        parts = x.reshape(PARTS, -1, *x.shape[1:]), jax.random.split(key, PARTS)
        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, values = jax.lax.scan(add, zeros, parts)
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, values.mean()

    return step


def ways(model: Model) -> Iterator[tuple[str, Way]]:
    """The step as one writes it, and with each measure."""
    stack = Stack(model.config, model.layer)
    lean = jaxmem.substitute(stack)
    remat = Stack(model.config, nn.remat(model.layer))
    plain = step_of(mean_square(stack))
    both = step_of(mean_square(lean))
    jit = functools.partial(jax.jit, donate_argnums=(0, 1))
    schedule = functools.partial(jaxmem.schedule, donate_argnums=(0, 1))
    yield "plain", Way(jit(plain), TX)
    yield "jax.checkpoint of each layer", Way(jit(step_of(mean_square(remat))), TX)
    yield "schedule", Way(schedule(plain, target="cpu", progress=False), TX)
    budget = int(TIGHT * peak_of(model, Way(schedule(plain, target="cpu"), TX)))
    tight = schedule(plain, budget, target="cpu", progress=False)
    yield f"schedule, {TIGHT:.0%} of its bytes", Way(tight, TX)
    yield "substitute", Way(jit(both), TX)
    yield "both", Way(schedule(both, target="cpu", progress=False), TX)


def micro_batches(model: Model) -> Iterator[tuple[str, Way]]:
    """Gradients of four parts of the batch: added up, and folded into the moments."""
    loss = mean_square(Stack(model.config, model.layer))
    step = jax.jit(added_up(loss), donate_argnums=(0, 1))
    yield f"{PARTS} micro-batches by hand", Way(step, TX)
    tx = jaxmem.adama(1e-4, weight_decay=1e-4)
    step = jaxmem.microbatch(loss, tx, PARTS)
    yield f"{PARTS} micro-batches, AdamA", Way(step, tx)


def arguments(model: Model, way: Way) -> tuple[Any, Any, Any, Any]:
    key = jax.random.key(0)
    x = jax.random.normal(key, (*model.shape, model.config.width), F32)
    stack = Stack(model.config, model.layer)
    params = stack.init({"params": key, "dropout": key}, x)["params"]
    return params, way.tx.init(params), x, key


def peak_of(model: Model, way: Way) -> int:
    args = jax.eval_shape(lambda: arguments(model, way))
    return jaxmem.estimate(way.step, *args, target="cpu").peak_bytes


def measured(model: Model, found: Mapping[str, Way]) -> Iterator[Sequence]:
    """Rows of ways that are run in turn."""
    runs = {name: arguments(model, way) for name, way in found.items()}
    seconds: dict[str, list[float]] = {name: [] for name in found}
    names = list(found)
    for k in range(-2, ROUNDS):  # two to warm up
        for name in names[k % len(names) :] + names[: k % len(names)]:
            params, state, x, key = runs[name]
            start = time.perf_counter()
            params, state, _ = jax.block_until_ready(
                found[name].step(params, state, x, key)
            )
            runs[name] = params, state, x, key
            if k >= 0:
                seconds[name].append(time.perf_counter() - start)
    first = seconds[names[0]]
    for name, times in seconds.items():
        low, middle, high = statistics.quantiles(times, n=4)
        ratio = statistics.median(a / b for a, b in zip(times, first, strict=True))
        peak = peak_of(model, found[name]) / MIB
        yield name, f"{middle:.3f}", f"{low:.3f}", f"{high:.3f}", f"{ratio:.2f}", peak


def main() -> None:
    rows = []
    for name, model in MODELS.items():
        for some in (ways, micro_batches):
            found = measured(model, dict(some(model)))
            rows += [(name, *row, ROUNDS) for row in found]
    publish("cpu", COLUMNS, rows)


if __name__ == "__main__":
    main()
