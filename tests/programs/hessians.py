"""A pair potential is fitted to second derivatives of an energy.

All tangents of `jacfwd` at once: of n particles the Hessian has (3 n)^2 entries, and
its computation n pairs for each.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, of_size, training_step


class Size(NamedTuple):
    particles: int
    width: int


def energy(params, x):
    apart = x[:, None] - x[None]
    distance = jnp.sqrt((apart**2).sum(-1) + 1e-3)
    hidden = jnp.tanh(distance[..., None] * params["in"] + params["bias"])
    return (hidden @ params["out"]).sum()


def loss(params, x, hessian):
    flat = lambda v: energy(params, v.reshape(x.shape))
    return jnp.mean((jax.jacfwd(jax.grad(flat))(x.ravel()) - hessian) ** 2)


def make(size: str):
    s = of_size(size, small=Size(4, 5), big=Size(96, 16))
    tx = optax.adam(1e-3)

    def init(key):
        k = jax.random.split(key, 3)
        params = {
            "in": jax.random.normal(k[0], (s.width,)),
            "bias": jnp.linspace(-1, 1, s.width),
            "out": 0.1 * jax.random.normal(k[1], (s.width,)),
        }
        x = jax.random.normal(k[2], (s.particles, 3))
        return (params, tx.init(params)), x, jnp.eye(3 * s.particles)

    return training_step(loss, tx), arguments(size, init), (0,)
