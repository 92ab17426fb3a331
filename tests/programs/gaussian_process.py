"""The marginal likelihood of a Gaussian process, by a Cholesky factorisation.

After Rasmussen and Williams 2006, with a rate for each feature.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, of_size, training_step


class Size(NamedTuple):
    points: int
    features: int


def covariance(params, x):
    scaled = x * jnp.exp(params["rates"])
    squared = ((scaled[:, None] - scaled[None]) ** 2).sum(-1)
    distance = jnp.sqrt(5 * squared + 1e-6)
    matern = (1 + distance + distance**2 / 3) * jnp.exp(-distance)
    noise = jnp.exp(params["noise"]) + 1e-3
    return jnp.exp(params["height"]) * matern + noise * jnp.eye(len(x))


def loss(params, x, y):
    """The negative log likelihood of the observations, of one of them."""
    lower = jnp.linalg.cholesky(covariance(params, x))
    white = jax.scipy.linalg.solve_triangular(lower, y, lower=True)
    log_determinant = jnp.log(jnp.diagonal(lower)).sum()
    return (0.5 * (white**2).sum() + log_determinant) / len(x)


def make(size: str):
    s = of_size(size, small=Size(6, 3), big=Size(2048, 8))
    tx = optax.adam(1e-2)

    def init(key):
        k = jax.random.split(key, 2)
        params = {
            "rates": jnp.zeros(s.features),
            "height": jnp.asarray(0.0),
            "noise": jnp.asarray(-1.0),
        }
        x = jax.random.normal(k[0], (s.points, s.features))
        y = jnp.sin(x.sum(-1)) + 0.1 * jax.random.normal(k[1], (s.points,))
        return (params, tx.init(params)), x, y

    return training_step(loss, tx), arguments(size, init), (0,)
