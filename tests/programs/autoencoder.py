"""A variational autoencoder of images: a latent is drawn, its divergence is paid for.

After Kingma and Welling 2013, with convolutions, in Flax nnx; its state is split from
its graph, as in functional loops.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.programs._common import arguments, of_size


class Size(NamedTuple):
    batch: int
    side: int
    width: int
    latent: int


class Autoencoder(nnx.Module):
    """Images [B, S, S, 3] from images, with the latents' means and log variances."""

    def __init__(self, s: Size, rngs: nnx.Rngs):
        small, w = s.side // 4, s.width
        self.shape = (small, small, 2 * w)
        self.down = nnx.List(
            [
                nnx.Conv(3, w, (3, 3), strides=2, rngs=rngs),
                nnx.Conv(w, 2 * w, (3, 3), strides=2, rngs=rngs),
            ]
        )
        flat = small * small * 2 * w
        self.latent = nnx.Linear(flat, 2 * s.latent, rngs=rngs)
        self.start = nnx.Linear(s.latent, flat, rngs=rngs)
        self.up = nnx.List(
            [
                nnx.ConvTranspose(2 * w, w, (3, 3), strides=(2, 2), rngs=rngs),
                nnx.ConvTranspose(w, 3, (3, 3), strides=(2, 2), rngs=rngs),
            ]
        )
        self.rngs = rngs

    def __call__(self, x):
        for conv in self.down:
            x = nnx.relu(conv(x))
        mean, log_variance = jnp.split(self.latent(x.reshape(len(x), -1)), 2, axis=-1)
        noise = jax.random.normal(self.rngs.noise(), mean.shape)
        z = mean + jnp.exp(log_variance / 2) * noise
        x = nnx.relu(self.start(z)).reshape(len(z), *self.shape)
        x = nnx.relu(self.up[0](x))
        return self.up[1](x), mean, log_variance


def loss(model, images):
    """The negative bound on the evidence, of pixels in [0, 1]."""
    logits, mean, log_variance = model(images)
    of_pixels = optax.sigmoid_binary_cross_entropy(logits, images)
    divergence = 0.5 * (jnp.exp(log_variance) + mean**2 - 1 - log_variance)
    return (of_pixels.sum((1, 2, 3)) + divergence.sum(-1)).mean()


def make(size: str):
    s = of_size(size, small=Size(3, 8, 4, 5), big=Size(512, 64, 64, 256))

    def init(key):
        k = jax.random.split(key, 3)
        model = Autoencoder(s, nnx.Rngs(params=k[0], noise=k[1]))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        images = jax.random.uniform(k[2], (s.batch, s.side, s.side, 3))
        return nnx.split((model, optimizer)), images

    (graph, state), images = arguments(size, init)

    def step(state, images):
        model, optimizer = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(loss)(model, images)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    return step, (state, images), (0,)
