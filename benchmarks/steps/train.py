"""A train step of a loss and an optimizer."""

from collections.abc import Callable

import jax
import optax


def train_step(loss_fn: Callable, tx: optax.GradientTransformation) -> Callable:
    """A step as a user writes it: ((params, moments), batch) -> (the same, loss)."""

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step
