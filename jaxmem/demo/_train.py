"""An ordinary training loop: adamw under `jax.jit` with a donated state.

Two runs take turns, step by step, on the same batches, so that whatever else the
machine does slows both alike and the ratio of their times means something.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import jax
import numpy as np
import optax

from jaxmem.demo._settings import Settings


@dataclass
class Run:
    """One model in training, and what was seen of it."""

    forward: Callable
    step: Callable
    loss: Callable
    state: Any
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: float = float("nan")


def make_loss(forward: Callable, seed: int | None = None) -> Callable:
    """`loss(params, tokens, number)`: cross entropy of the next byte, in nats a byte.

    With a seed dropout acts, with masks of this seed and the number of the step.
    """

    def loss(params, tokens, number):
        key = None
        if seed is not None:
            key = jax.random.fold_in(jax.random.key(seed), number)
        logits = forward(params, tokens[:, :-1], key)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    return loss


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW, warmed up over a tenth of the run and decayed by a cosine."""
    warm = max(1, settings.steps // 10)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, warm, max(settings.steps, warm + 1)
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95))


def make_step(loss: Callable, optimizer: optax.GradientTransformation) -> Callable:
    """`step(state, tokens, number)` -> (state, loss); the state may be donated."""

    def step(state, tokens, number):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, tokens, number)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step


def start(params, forward: Callable, settings: Settings) -> Run:
    """A run at step 0."""
    optimizer = make_optimizer(settings)
    loss = make_loss(forward, settings.seed if settings.dropout else None)
    step = make_step(loss, optimizer)
    return Run(forward, step, loss, (params, optimizer.init(params)))


def train(
    runs: Mapping[str, Run],
    batches: Iterator[np.ndarray],
    settings: Settings,
    report: Callable[[int, Mapping[str, Run]], None] = lambda step, runs: None,
) -> None:
    """Trains all runs in turns on the same batches; `report` is called each step."""
    order = list(runs)
    tokens = next(batches)
    with ThreadPoolExecutor() as pool:
        compiled = pool.map(_compiled, runs.values(), repeat(tokens))
        steps = dict(zip(order, compiled, strict=True))
    for number in range(settings.steps):
        tokens = tokens if number == 0 else next(batches)
        for name in order:
            _advance(runs[name], steps[name], tokens, number)
        order.reverse()  # neither run is always the one with the warm cache
        report(number + 1, runs)


def _compiled(run: Run, tokens: np.ndarray) -> Callable:
    step = jax.jit(run.step, donate_argnums=0)
    return step.lower(run.state, tokens, np.int32(0)).compile()


def _advance(run: Run, step: Callable, tokens: np.ndarray, number: int) -> None:
    began = time.perf_counter()
    run.state, loss = step(run.state, tokens, np.int32(number))
    run.losses.append(float(loss))
    run.seconds.append(time.perf_counter() - began)


def validate(run: Run, batches: Iterator[np.ndarray], count: int) -> float:
    """Mean loss over `count` batches, without dropout."""
    loss = jax.jit(make_loss(run.forward))
    losses = [loss(run.state[0], next(batches), 0) for _ in range(count)]
    return float(np.mean([float(x) for x in losses]))
