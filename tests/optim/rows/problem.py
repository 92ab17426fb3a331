"""A model with a table, batches of ids, and train steps on it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem import ops, optim
from tests.arrays import array

ROWS, WIDTH, IDS, STEPS = 200, 4, 24, 50
LR = 0.1
TABLE = "embed/table"


def params(rows=ROWS, width=WIDTH):
    r = np.random.default_rng(0)
    draw = lambda *shape: array(r.standard_normal(shape), jnp.float32)
    return {"embed": {"table": draw(rows, width)}, "w": draw(width, width)}


def batches(steps=STEPS, rows=ROWS, ids=IDS):
    """Few of the rows, so that ids come twice in a batch and in several batches."""
    r = np.random.default_rng(1)
    return array(r.integers(-rows // 10, rows // 10, (steps, ids)), jnp.int32)


def loss(params, ids):
    y = ops.embed(params["embed"]["table"], ids) @ params["w"]
    return jnp.sum(jnp.tanh(y) ** 2) / ids.size


def train_step(tx, rows=True, loss=loss):
    """(parameters, state), ids -> the same after a step, loss."""
    grad = optim.value_and_row_grad(loss, TABLE) if rows else jax.value_and_grad(loss)

    def step(carry, ids):
        params, state = carry
        value, grads = grad(params, ids)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    return step


@functools.partial(jax.jit, static_argnums=(0, 2))
def run(tx, ids, rows=True):
    """Parameters and state after all batches, in a scan."""
    given = params()
    return jax.lax.scan(train_step(tx, rows), (given, tx.init(given)), ids)[0]


def dense_gradient(p, w, ids):
    """Of the table and of w, in numpy float64."""
    x = p[ids]
    y = np.tanh(x @ w)
    dy = 2 * y * (1 - y**2) / ids.size
    table = np.zeros_like(p)
    np.add.at(table, ids, dy @ w.T)
    return table, x.T @ dy
