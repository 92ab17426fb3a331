"""A neural ordinary differential equation by Runge-Kutta steps of one length.

After Chen et al. 2018, differentiated through the solver, as `lax.scan` does it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, dense, of_size, training_step


class Size(NamedTuple):
    batch: int
    width: int
    steps: int


def field(params, t, y):
    at = jnp.full_like(y[:, :1], t)
    hidden = jnp.tanh(jnp.concatenate([y, at], axis=-1) @ params["in"] + params["bias"])
    return jnp.tanh(hidden @ params["middle"]) @ params["out"]


def solve(params, y, steps: int):
    """y at 1 from y at 0, by the classical method of fourth order."""
    h = 1.0 / steps

    def advance(y, i):
        t = i * h
        k1 = field(params, t, y)
        k2 = field(params, t + h / 2, y + h / 2 * k1)
        k3 = field(params, t + h / 2, y + h / 2 * k2)
        k4 = field(params, t + h, y + h * k3)
        return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    return jax.lax.scan(advance, y, jnp.arange(steps))[0]


def make(size: str):
    s = of_size(size, small=Size(4, 6, 5), big=Size(8192, 256, 40))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def loss(params, y, end):
        return jnp.mean((solve(params, y, s.steps) - end) ** 2)

    def init(key):
        k = jax.random.split(key, 5)
        params = {
            "in": dense(k[0], s.width + 1, 2 * s.width),
            "bias": jnp.zeros(2 * s.width),
            "middle": dense(k[1], 2 * s.width, 2 * s.width),
            "out": dense(k[2], 2 * s.width, s.width),
        }
        y, end = jax.random.normal(k[3], (2, s.batch, s.width))
        return (params, tx.init(params)), y, end

    return training_step(loss, tx), arguments(size, init), (0,)
