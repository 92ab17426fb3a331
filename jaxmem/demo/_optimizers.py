"""AdamW on the whole batch, AdamW on accumulated gradients, and AdamA, each as a step.

All three clip by the global norm, have one schedule and one weight decay. AdamA takes
in the gradient of each micro-batch as it comes, and so clips each by itself.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax

import jaxmem
from jaxmem.demo._settings import Settings

_B2, _DECAY = 0.95, 1e-4


def make_step(loss: Callable, settings: Settings, adama: bool = False):
    """(optimizer, step) with `step(state, tokens, number)` -> (state, loss).

    Args:
        loss: `(params, tokens, key)`, the mean over the tokens.
        settings: its `n` micro-batches are accumulated in each step, which trains what
            its technique trains: of that part alone are gradients and moments.
        adama: through `jaxmem.microbatch` and AdamA, in place of AdamW.
    """
    optimizer = make_optimizer(settings, adama)
    make = _adama_step if adama else _adamw_step
    return optimizer, make(loss, optimizer, settings)


def make_optimizer(settings: Settings, adama: bool) -> optax.GradientTransformation:
    """Warmed up over a tenth of the run and decayed by a cosine."""
    warm = max(1, settings.steps // 10)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, warm, max(settings.steps, warm + 1)
    )
    kind = partial(jaxmem.adama, v_scale=settings.v_scale) if adama else optax.adamw
    return optax.chain(
        optax.clip_by_global_norm(1.0), kind(rate, b2=_B2, weight_decay=_DECAY)
    )


def step_key(settings: Settings, number) -> jax.Array | None:
    """The key of a step's dropout masks and samples; None where nothing is drawn."""
    if not settings.draws:
        return None
    return jax.random.fold_in(jax.random.key(settings.seed), number)


def _adamw_step(loss, optimizer, settings: Settings) -> Callable:
    def step(state, tokens, number):
        params, frozen = jaxmem.trainable(state[0], settings.how.trains)

        def gradient(params, *batch):
            return jaxmem.value_and_grad(loss)(params, frozen, *batch)

        if settings.n > 1:
            gradient = _accumulated(gradient, settings.n)
        value, grads = gradient(params, tokens, step_key(settings, number))
        updates, moments = optimizer.update(grads, state[1], params)
        params = optax.apply_updates(params, updates)
        return (frozen.merge(params), moments), value

    return step


def _accumulated(gradient: Callable, n: int) -> Callable:
    """The mean over n micro-batches as one writes it: a scan that carries the sum."""

    def mean(params, tokens, key):
        crops = tokens.reshape(n, -1, tokens.shape[-1])
        keys = None if key is None else jax.random.split(key, n)

        def body(total, item):
            return jax.tree.map(jnp.add, total, gradient(params, *item)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
        total, _ = jax.lax.scan(body, zeros, (crops, keys))
        return jax.tree.map(lambda x: x / n, total)

    return mean


def _adama_step(loss, optimizer, settings: Settings) -> Callable:
    def of_part(params, frozen, tokens, key):
        return loss(frozen.merge(params), tokens, key), frozen

    whole = jaxmem.microbatch(
        of_part, optimizer, settings.n, has_model_state=True, clip="two_pass"
    )

    def step(state, tokens, number):
        params, frozen = jaxmem.trainable(state[0], settings.how.trains)
        key = step_key(settings, number)
        params, moments, frozen, metrics = whole(params, state[1], frozen, tokens, key)
        return (frozen.merge(params), moments), metrics["loss"]

    return step
