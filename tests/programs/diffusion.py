"""A denoiser of images: a small U-Net that is told how noisy they are.

After Ho et al. 2020, in Flax linen, with a moving average of its parameters.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, of_size


class Size(NamedTuple):
    batch: int
    side: int
    width: int


class Block(nn.Module):
    """Two normalised convolutions round a sum with the noise level's embedding."""

    width: int

    @nn.compact
    def __call__(self, x, level):
        norm = lambda x: nn.silu(nn.GroupNorm(num_groups=4)(x))
        y = nn.Conv(self.width, (3, 3))(norm(x))
        y = y + nn.Dense(self.width)(level)[:, None, None]
        y = nn.Conv(self.width, (3, 3))(norm(y))
        return nn.Conv(self.width, (1, 1))(x) + y


class UNet(nn.Module):
    """The noise in images [B, S, S, 3] at levels [B]."""

    width: int
    block: type[nn.Module] = Block

    @nn.compact
    def __call__(self, x, levels):
        angles = levels[:, None] * 1000.0 ** jnp.linspace(0, 1, self.width // 2)
        level = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        level = nn.silu(nn.Dense(4 * self.width)(level))
        x, passed = nn.Conv(self.width, (3, 3))(x), []
        for width in (self.width, 2 * self.width):
            x = self.block(width)(x, level)
            passed.append(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = self.block(2 * self.width)(x, level)
        for width in (2 * self.width, self.width):
            b, h, w, c = x.shape
            x = jax.image.resize(x, (b, 2 * h, 2 * w, c), "nearest")
            x = self.block(width)(jnp.concatenate([x, passed.pop()], axis=-1), level)
        return nn.Conv(3, (3, 3))(nn.silu(nn.GroupNorm(num_groups=4)(x)))


def make(size: str):
    s = of_size(size, small=Size(2, 8, 4), big=Size(128, 32, 64))
    model = UNet(s.width)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-4))

    def loss(params, images, key):
        k = jax.random.split(key)
        levels = jax.random.uniform(k[0], (len(images),))
        noise = jax.random.normal(k[1], images.shape)
        kept = jnp.cos(levels * jnp.pi / 2)[:, None, None, None]
        noisy = kept * images + jnp.sqrt(1 - kept**2) * noise
        return jnp.mean((model.apply(params, noisy, levels) - noise) ** 2)

    def step(state, images):
        params, average, moments, key = state
        key, now = jax.random.split(key)
        value, grads = jax.value_and_grad(loss)(params, images, now)
        updates, moments = tx.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 1e-4)
        return (params, average, moments, key), value

    def init(key):
        k = jax.random.split(key, 3)
        images = jax.random.normal(k[0], (s.batch, s.side, s.side, 3))
        params = model.init(k[1], images, jnp.zeros(s.batch))
        average = jax.tree.map(jnp.copy, params)
        return (params, average, tx.init(params), k[2]), images

    return step, arguments(size, init), (0,)
