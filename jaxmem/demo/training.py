"""An ordinary training loop: a step under `jax.jit` with a donated state.

The two runs alternate, step by step, on the same batches, so that whatever else the
machine does slows both alike and the ratio of their times is meaningful.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem
from jaxmem.demo import models
from jaxmem.demo.optimizers import OPTIMIZERS
from jaxmem.demo.settings import Settings
from jaxmem.demo.techniques import loss_from_logits
from jaxmem.optim import schedule_free_eval_params


@dataclass
class TrainingRun:
    """One model in training, and its history."""

    loss: Callable
    step: Callable
    state: Any
    model: Callable = lambda state: state[0]  # the one to validate
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: float = float("nan")


def pair(settings: Settings) -> dict[str, tuple[Any, Callable]]:
    """(initial parameters, loss) of the plain model and of the substituted one."""
    how = settings.how
    plain = how.first(models.build(settings))
    both = {
        "plain": (plain, loss_from_logits),
        "substituted": (how.change(plain), how.loss),
    }
    result = {}
    for name, (model, loss) in both.items():
        params, forward = models.split(model, settings)
        result[name] = params, loss(forward)
    return result


def make_optimizer(
    settings: Settings, name: str = "adamw"
) -> optax.GradientTransformation:
    """The optimizer of this name, clipped by the global norm."""
    # The rate warms up over a tenth of the run and decays by a cosine.
    how = OPTIMIZERS[name]
    warm = max(1, settings.steps // 10)
    peak = how.rate * settings.learning_rate
    rate = optax.warmup_cosine_decay_schedule(
        0.0, peak, warm, max(settings.steps, warm + 1)
    )
    if how.averages:
        rate = optax.warmup_constant_schedule(0.0, peak, warm)
    more = {"v_scale": settings.v_scale} if how.in_state else {}
    return optax.chain(optax.clip_by_global_norm(1.0), how.make(rate, **more))


def step_key(settings: Settings, number) -> jax.Array | None:
    """The key of a step's dropout masks and samples; None if nothing is drawn."""
    if not settings.draws:
        return None
    return jax.random.fold_in(jax.random.key(settings.seed), number)


def start(
    params, loss: Callable, settings: Settings, name: str = "adamw"
) -> TrainingRun:
    """A run at step 0, with `step((params, moments), tokens, number)`.

    Args:
        params: initial parameters; the technique says which of them are trained.
        loss: `(params, tokens, key)`, the mean over the tokens.
        settings: each step accumulates gradients of `settings.n` micro-batches.
        name: of the optimizer; one that accumulates gradients in its own state runs
            through `jaxmem.microbatch`.
    """
    optimizer = make_optimizer(settings, name)
    make = _in_state if OPTIMIZERS[name].in_state else _in_sum
    update = make(loss, optimizer, settings.n)

    def step(state, tokens, number):
        trained, frozen = jaxmem.trainable(state[0], settings.how.trains)
        key = step_key(settings, number)
        trained, moments, value = update(trained, state[1], frozen, tokens, key)
        return (frozen.merge(trained), moments), value

    def model(state):
        if not OPTIMIZERS[name].averages:
            return state[0]
        trained, frozen = jaxmem.trainable(state[0], settings.how.trains)
        return frozen.merge(schedule_free_eval_params(state[1], trained))

    trained, _ = jaxmem.trainable(params, settings.how.trains)
    return TrainingRun(loss, step, (params, optimizer.init(trained)), model)


def _in_sum(loss, optimizer, n: int) -> Callable:
    def update(params, moments, frozen, tokens, key):
        def gradient(params, *batch):
            return jaxmem.value_and_grad(loss)(params, frozen, *batch)

        mean = accumulated(gradient, n) if n > 1 else gradient
        value, grads = mean(params, tokens, key)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    return update


def accumulated(gradient: Callable, n: int) -> Callable:
    """The mean over n micro-batches as users write it: a scan that carries the sum."""

    def mean(params, tokens, key):
        crops = tokens.reshape(n, -1, tokens.shape[-1])
        keys = None if key is None else jax.random.split(key, n)

        def body(total, item):
            return jax.tree.map(jnp.add, total, gradient(params, *item)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
        total, _ = jax.lax.scan(body, zeros, (crops, keys))
        return jax.tree.map(lambda x: x / n, total)

    return mean


def _in_state(loss, optimizer, n: int) -> Callable:
    def of_part(params, frozen, tokens, key):
        return loss(frozen.merge(params), tokens, key), frozen

    # AdamA takes each micro-batch's gradient as it is computed, so it clips each alone,
    # in a second backward pass: in one pass no gradient could be released.
    step = jaxmem.microbatch(
        of_part, optimizer, n, has_model_state=True, clip="two_pass"
    )

    def update(params, moments, frozen, tokens, key):
        params, moments, _, metrics = step(params, moments, frozen, tokens, key)
        return params, moments, metrics["loss"]

    return update


def train(
    runs: Mapping[str, TrainingRun],
    batches: Iterator[np.ndarray],
    settings: Settings,
    report: Callable[[int, Mapping[str, TrainingRun]], None] = lambda step, runs: None,
) -> None:
    """Trains the runs alternately on the same batches; `report` is called each step."""
    order, tokens = list(runs), next(batches)

    def compile_step(run: TrainingRun) -> Callable:
        step = jax.jit(run.step, donate_argnums=0)
        return step.lower(run.state, tokens, np.int32(0)).compile()

    with ThreadPoolExecutor() as pool:
        steps = dict(zip(order, pool.map(compile_step, runs.values()), strict=True))
    for number in range(settings.steps):
        tokens = tokens if number == 0 else next(batches)
        for name in order:
            run, began = runs[name], time.perf_counter()
            run.state, loss = steps[name](run.state, tokens, np.int32(number))
            run.losses.append(float(loss))  # waits for the step
            run.seconds.append(time.perf_counter() - began)
        order.reverse()  # neither run always has the warm cache
        report(number + 1, runs)


def validate(run: TrainingRun, batches: Iterator[np.ndarray], count: int) -> float:
    """The mean loss over `count` batches, without dropout."""
    loss, model = jax.jit(run.loss), run.model(run.state)
    return float(np.mean([loss(model, next(batches)) for _ in range(count)]))
