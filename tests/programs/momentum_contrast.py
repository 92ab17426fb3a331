"""Queries against keys of a slower net and a queue of earlier keys.

After He et al. 2020: the keys' net is a moving average of the queries', and is not
differentiated; the oldest keys leave the queue. Plain JAX.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, dense, of_size


class Size(NamedTuple):
    batch: int
    features: int
    width: int
    queue: int


def embedded(params, x):
    x = jax.nn.relu(x @ params["in"] + params["bias"]) @ params["out"]
    return x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def contrast(params, slow, x, queue, temperature=0.2):
    """The loss, and the keys of this batch."""
    queries, keys = embedded(params, x[0]), embedded(slow, x[1])
    keys = jax.lax.stop_gradient(keys)
    positive = (queries * keys).sum(-1, keepdims=True)
    logits = jnp.concatenate([positive, queries @ queue.T], axis=-1) / temperature
    first = jnp.zeros(len(logits), int)
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, first)
    return entropy.mean(), keys


def make(size: str):
    s = of_size(size, small=Size(4, 6, 8, 12), big=Size(1024, 512, 128, 65_536))
    tx = optax.sgd(0.03, momentum=0.9)

    def step(state, x):
        params, slow, queue, moments = state
        gradient = jax.value_and_grad(contrast, has_aux=True)
        (value, keys), grads = gradient(params, slow, x, queue)
        updates, moments = tx.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        slow = optax.incremental_update(params, slow, 1e-3)
        queue = jnp.concatenate([queue[len(keys) :], keys])
        return (params, slow, queue, moments), value

    def init(key):
        k = jax.random.split(key, 4)
        params = {
            "in": dense(k[0], s.features, 4 * s.width),
            "bias": jnp.zeros(4 * s.width),
            "out": dense(k[1], 4 * s.width, s.width),
        }
        slow = jax.tree.map(jnp.copy, params)
        queue = jax.random.normal(k[2], (s.queue, s.width)) / s.width**0.5
        x = jax.random.normal(k[3], (2, s.batch, s.features))
        return (params, slow, queue, tx.init(params)), x

    return step, arguments(size, init), (0,)
