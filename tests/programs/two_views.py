"""Two views of each image are drawn together, all others apart.

The loss of SimCLR (Chen et al. 2020): logits between all pairs of a batch, on both
sides of which stand the same embeddings. Flax linen, SGD with momentum.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, of_size, training_step


class Size(NamedTuple):
    batch: int
    features: int
    width: int


class Projected(nn.Module):
    """Unit vectors of the examples [B, F]."""

    width: int

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.gelu(nn.LayerNorm()(nn.Dense(2 * self.width)(x)))
        x = nn.Dense(self.width)(x)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def attraction(h, temperature=0.1):
    """Of embeddings [2 B, W], first all first views, then all second ones."""
    n = len(h)
    logits = jnp.where(jnp.eye(n, dtype=bool), -jnp.inf, h @ h.T / temperature)
    other = jnp.roll(jnp.arange(n), n // 2)
    return optax.softmax_cross_entropy_with_integer_labels(logits, other).mean()


def make(size: str):
    s = of_size(size, small=Size(4, 6, 8), big=Size(4096, 256, 256))
    model = Projected(s.width)
    tx = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, 0.9))

    def loss(params, x, key):
        noise = 0.1 * jax.random.normal(key, (2, *x.shape))
        return attraction(model.apply(params, (x + noise).reshape(-1, x.shape[-1])))

    def init(key):
        k = jax.random.split(key, 3)
        x = jax.random.normal(k[0], (s.batch, s.features))
        params = model.init(k[1], x)
        return (params, tx.init(params)), x, k[2]

    return training_step(loss, tx), arguments(size, init), (0,)
