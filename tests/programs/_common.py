"""What the programs share: their sizes, their arguments, and the form of a step."""

import equinox as eqx
import jax
import optax


def of_size(size: str, **sizes):
    """The numbers of this size; ValueError names those that the program has."""
    if size not in sizes:
        raise ValueError(f"size={size!r}: one of {', '.join(sizes)}")
    return sizes[size]


def arguments(size: str, init):
    """What `init(key)` gives, by which a program makes its state and its batch.

    Arrays for "small"; shapes alone for "big", which no machine at hand need hold.
    """
    make = eqx.filter_eval_shape if size == "big" else call_jitted
    return make(init, jax.random.key(0))


def call_jitted(init, key):
    return eqx.filter_jit(init)(key)


def training_step(loss, tx):
    """`step((params, moments), *batch)` -> the new state, and the loss."""

    def step(state, *batch):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step


def dense(key, *shape):
    """Normal weights of a layer: the last axis but one is summed over."""
    return jax.random.normal(key, shape) * shape[-2] ** -0.5
