"""A radiance field: colours along rays, composed by what each sample lets through.

After Mildenhall et al. 2020, in Flax linen.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, of_size, training_step


class Size(NamedTuple):
    rays: int
    samples: int
    width: int
    depth: int


def waves(x, frequencies: int):
    """Sines and cosines of the last axis at powers of two."""
    angles = x[..., None, :] * 2.0 ** jnp.arange(frequencies)[:, None]
    both = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return jnp.concatenate([x, both.reshape(*x.shape[:-1], -1)], axis=-1)


class Field(nn.Module):
    """Density and colour at a point [..., 3] seen from a direction [..., 3]."""

    width: int
    depth: int

    @nn.compact
    def __call__(self, points, directions):
        given = x = waves(points, 10)
        for i in range(self.depth):
            if i == self.depth // 2:
                x = jnp.concatenate([x, given], axis=-1)
            x = nn.relu(nn.Dense(self.width)(x))
        density = nn.softplus(nn.Dense(1)(x))[..., 0]
        seen = jnp.broadcast_to(waves(directions, 4), (*x.shape[:-1], 27))
        x = jnp.concatenate([nn.Dense(self.width)(x), seen], axis=-1)
        x = nn.relu(nn.Dense(self.width // 2)(x))
        return density, nn.sigmoid(nn.Dense(3)(x))


def render(field, rays, key, samples: int, near=2.0, far=6.0):
    """Colours [R, 3] of rays: an origin and a direction each."""
    origins, directions = rays
    edges = jnp.linspace(near, far, samples + 1)
    jitter = jax.random.uniform(key, (origins.shape[0], samples))
    depths = edges[:-1] + jitter * (far - near) / samples
    points = origins[:, None] + depths[..., None] * directions[:, None]
    density, colours = field(points, directions[:, None])
    gaps = jnp.diff(depths, axis=-1, append=jnp.full_like(depths[:, :1], far))
    opaque = 1 - jnp.exp(-density * gaps)
    through = jnp.cumprod(1 - opaque + 1e-10, axis=-1)
    before = jnp.concatenate([jnp.ones_like(through[:, :1]), through[:, :-1]], axis=-1)
    return ((opaque * before)[..., None] * colours).sum(axis=1)


def make(size: str):
    s = of_size(size, small=Size(5, 6, 16, 3), big=Size(4096, 128, 256, 8))
    model = Field(s.width, s.depth)
    tx = optax.adam(optax.exponential_decay(5e-4, 250_000, 0.1))

    def loss(params, rays, colours, key):
        field = lambda *at: model.apply(params, *at)
        return jnp.mean((render(field, rays, key, s.samples) - colours) ** 2)

    def init(key):
        k = jax.random.split(key, 5)
        origins, directions = jax.random.normal(k[0], (2, s.rays, 3))
        directions /= jnp.linalg.norm(directions, axis=-1, keepdims=True)
        params = model.init(k[1], origins[:, None], directions[:, None])
        colours = jax.random.uniform(k[2], (s.rays, 3))
        return (params, tx.init(params)), (origins, directions), colours, k[3]

    return training_step(loss, tx), arguments(size, init), (0,)
