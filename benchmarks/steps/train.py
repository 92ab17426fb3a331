"""Train steps of a loss and an optimizer, as a user writes them."""

from collections.abc import Callable

import jax
import optax


def train_step(loss_fn: Callable, tx: optax.GradientTransformation) -> Callable:
    """((params, moments), *batch) -> ((params, moments), loss)."""

    def step(state, *batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def flat_step(value_and_grad: Callable, tx: optax.GradientTransformation) -> Callable:
    """(params, moments, *batch) -> (params, moments, loss)."""

    def step(params, opt_state, *batch):
        loss, grads = value_and_grad(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step
