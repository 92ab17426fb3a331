"""A scan that adds up matrices: many kernels over all pairs, each weighted.

The gradient keeps a matrix for each of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, of_size, training_step


class Size(NamedTuple):
    points: int
    kernels: int


def loss(params, x, target):
    distance = (x[:, None] - x[None]) ** 2

    def add(total, scale):
        spread = jnp.log1p(jnp.exp(params["spread"] * scale))
        kernel = jnp.exp(-distance * spread) * jnp.cos(distance * params["turns"])
        return total + scale * kernel, None

    total, _ = jax.lax.scan(add, jnp.zeros_like(distance), params["scales"])
    return jnp.mean((total - target) ** 2)


def make(size: str):
    s = of_size(size, small=Size(6, 5), big=Size(2048, 64))
    tx = optax.sgd(1e-3)

    def init(key):
        k = jax.random.split(key, 2)
        params = {
            "spread": jnp.asarray(0.3),
            "turns": jnp.asarray(0.1),
            "scales": jnp.linspace(0.1, 1.0, s.kernels),
        }
        x = jax.random.normal(k[0], (s.points,))
        target = jax.random.normal(k[1], (s.points, s.points))
        return (params, tx.init(params)), x, target

    return training_step(loss, tx), arguments(size, init), (0,)
