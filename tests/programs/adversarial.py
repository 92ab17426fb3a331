"""A generative adversarial net: two nets with batch norm, two Adams, an average.

The discriminator has the penalty of its gradient at the data (Mescheder et al. 2018);
samples are drawn from a moving average of the generator. Flax linen.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, of_size


class Size(NamedTuple):
    batch: int
    side: int
    width: int
    latent: int


class Player(NamedTuple):
    """One net: its parameters, its batch statistics, its moments."""

    params: Any
    statistics: Any
    moments: Any


class Generator(nn.Module):
    """Images [B, S, S, 3] from noise [B, L]."""

    side: int
    width: int

    @nn.compact
    def __call__(self, z):
        norm = lambda x: nn.relu(nn.BatchNorm(use_running_average=False)(x))
        x = nn.Dense(self.side**2 // 16 * 2 * self.width, use_bias=False)(z)
        x = norm(x.reshape(len(z), self.side // 4, self.side // 4, 2 * self.width))
        x = norm(nn.ConvTranspose(self.width, (4, 4), (2, 2), use_bias=False)(x))
        return jnp.tanh(nn.ConvTranspose(3, (4, 4), (2, 2))(x))


class Discriminator(nn.Module):
    """A logit for each image: positive where it is taken for data."""

    width: int

    @nn.compact
    def __call__(self, x):
        x = nn.leaky_relu(nn.Conv(self.width, (4, 4), (2, 2))(x), 0.2)
        x = nn.Conv(2 * self.width, (4, 4), (2, 2), use_bias=False)(x)
        x = nn.leaky_relu(nn.BatchNorm(use_running_average=False)(x), 0.2)
        return nn.Dense(1)(x.reshape(len(x), -1))[:, 0]


def applied(net, params, statistics, x):
    """The output of a net, and its new batch statistics."""
    variables = {"params": params, "batch_stats": statistics}
    out, new = net.apply(variables, x, mutable=["batch_stats"])
    return out, new["batch_stats"]


def moved(tx, player: Player, grads, statistics) -> Player:
    updates, moments = tx.update(grads, player.moments, player.params)
    return Player(optax.apply_updates(player.params, updates), statistics, moments)


def make(size: str):
    s = of_size(size, small=Size(4, 8, 4, 5), big=Size(256, 64, 64, 128))
    generator, discriminator = Generator(s.side, s.width), Discriminator(s.width)
    tx = optax.adam(2e-4, b1=0.5, b2=0.999)

    def told_apart(params, statistics, images, made):
        judge = lambda x, statistics: applied(discriminator, params, statistics, x)
        real, statistics = judge(images, statistics)
        false, new = judge(made, statistics)
        slope = jax.grad(lambda x: judge(x, statistics)[0].sum())(images)
        penalty = 5.0 * jnp.mean(jnp.sum(slope**2, axis=(1, 2, 3)))
        return nn.softplus(-real).mean() + nn.softplus(false).mean() + penalty, new

    def deceived(params, statistics, z, judge: Player):
        made, new = applied(generator, params, statistics, z)
        logits, _ = applied(discriminator, judge.params, judge.statistics, made)
        return nn.softplus(-logits).mean(), new

    def step(state, images, z):
        maker, judge, average = state
        made, _ = applied(generator, maker.params, maker.statistics, z)
        (a, new), grads = jax.value_and_grad(told_apart, has_aux=True)(
            judge.params, judge.statistics, images, jax.lax.stop_gradient(made)
        )
        judge = moved(tx, judge, grads, new)
        (b, new), grads = jax.value_and_grad(deceived, has_aux=True)(
            maker.params, maker.statistics, z, judge
        )
        maker = moved(tx, maker, grads, new)
        average = optax.incremental_update(maker.params, average, 1e-3)
        return (maker, judge, average), (a, b)

    def init(key):
        k = jax.random.split(key, 4)
        z = jax.random.normal(k[0], (s.batch, s.latent))
        images = jax.random.normal(k[1], (s.batch, s.side, s.side, 3))

        def player(net, key, x):
            found = net.init(key, x)
            return Player(
                found["params"], found["batch_stats"], tx.init(found["params"])
            )

        maker = player(generator, k[2], z)
        judge = player(discriminator, k[3], images)
        return (maker, judge, jax.tree.map(jnp.copy, maker.params)), images, z

    return step, arguments(size, init), (0,)
