"""Meta-learning: a start from which a few steps of descent fit a task.

After Finn et al. 2017. The outer gradient goes through the inner ones.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, dense, of_size, training_step


class Size(NamedTuple):
    tasks: int
    points: int
    width: int
    steps: int


def net(params, x):
    x = jax.nn.relu(x @ params["in"] + params["shift"])
    x = jax.nn.relu(x @ params["middle"] + params["bias"])
    return x @ params["out"]


def error(params, x, y):
    return jnp.mean((net(params, x) - y) ** 2)


def adapted(params, x, y, steps: int, rate=0.05):
    """The parameters after some steps of gradient descent on one task."""

    def descend(params, _):
        grads = jax.grad(error)(params, x, y)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), None

    return jax.lax.scan(descend, params, None, length=steps)[0]


def make(size: str):
    s = of_size(size, small=Size(3, 5, 8, 2), big=Size(64, 256, 256, 10))
    tx = optax.adam(1e-3)

    def loss(params, support, query):
        def of_task(support, query):
            return error(adapted(params, *support, s.steps), *query)

        return jax.vmap(of_task)(support, query).mean()

    def task(key):
        """Points of sines, each of its own height and phase."""
        k = jax.random.split(key, 2)
        x = jax.random.uniform(k[0], (s.tasks, s.points, 1), minval=-5.0, maxval=5.0)
        height, phase = jax.random.uniform(k[1], (2, s.tasks, 1, 1), minval=0.1)
        return x, height * jnp.sin(x + phase)

    def init(key):
        k = jax.random.split(key, 5)
        params = {
            "in": dense(k[0], 1, s.width),
            "shift": jnp.zeros(s.width),
            "middle": dense(k[1], s.width, s.width),
            "bias": jnp.zeros(s.width),
            "out": dense(k[2], s.width, 1),
        }
        return (params, tx.init(params)), task(k[3]), task(k[4])

    return training_step(loss, tx), arguments(size, init), (0,)
