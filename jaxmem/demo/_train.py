"""An ordinary training loop: a step under `jax.jit` with a donated state.

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

import jaxmem
from jaxmem.demo._optimizers import make_step
from jaxmem.demo._settings import Settings


@dataclass
class Run:
    """One model in training, and what was seen of it."""

    loss: Callable
    step: Callable
    state: Any
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: float = float("nan")


def start(params, loss: Callable, settings: Settings, adama: bool = False) -> Run:
    """A run at step 0."""
    optimizer, step = make_step(loss, settings, adama)
    trained, _ = jaxmem.trainable(params, settings.how.trains)
    return Run(loss, step, (params, optimizer.init(trained)))


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
    loss = jax.jit(run.loss)
    losses = [loss(run.state[0], next(batches)) for _ in range(count)]
    return float(np.mean([float(x) for x in losses]))
