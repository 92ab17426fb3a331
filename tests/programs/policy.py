"""Proximal policy optimisation: a rollout in a scan, then a clipped loss over it.

After Schulman et al. 2017; the environment, pendulums to be swung up, is JAX, too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, dense, of_size


class Size(NamedTuple):
    worlds: int
    length: int
    width: int


def observed(world):
    angle, speed = world
    return jnp.stack([jnp.cos(angle), jnp.sin(angle), speed / 8], axis=-1)


def moved(world, force, h=0.05):
    """The next state of the pendulums, and what it is worth."""
    angle, speed = world
    reward = -(jnp.sin(angle / 2) ** 2 + 0.01 * speed**2 + 0.001 * force**2)
    speed = speed + h * (15 * jnp.sin(angle) + 3 * jnp.tanh(force))
    return (angle + h * speed, jnp.clip(speed, -8.0, 8.0)), reward


def judged(params, seen):
    """The mean of the forces, and the value of what is seen."""
    x = jnp.tanh(seen @ params["in"] + params["bias"])
    x = jnp.tanh(x @ params["middle"])
    mean, value = jnp.split(x @ params["out"], 2, axis=-1)
    return mean[..., 0], value[..., 0]


def log_density(params, force, mean):
    log_spread = params["log_spread"]
    return -0.5 * ((force - mean) / jnp.exp(log_spread)) ** 2 - log_spread


class Played(NamedTuple):
    """What a rollout left, each [T, N]."""

    seen: jax.Array
    force: jax.Array
    density: jax.Array
    value: jax.Array
    reward: jax.Array


def rollout(params, world, key, length: int):
    def act(world, key):
        seen = observed(world)
        mean, value = judged(params, seen)
        noise = jax.random.normal(key, mean.shape)
        force = mean + jnp.exp(params["log_spread"]) * noise
        density = log_density(params, force, mean)
        world, reward = moved(world, force)
        return world, Played(seen, force, density, value, reward)

    return jax.lax.scan(act, world, jax.random.split(key, length))


def advantages(played: Played, last, discount=0.99, smoothing=0.95):
    """How much better it went than was expected, by generalised estimates."""

    def back(carry, at):
        following, ahead = carry
        reward, value = at
        surprise = reward + discount * following - value
        ahead = surprise + discount * smoothing * ahead
        return (value, ahead), ahead

    start = last, jnp.zeros_like(last)
    return jax.lax.scan(back, start, (played.reward, played.value), reverse=True)[1]


def loss(params, played: Played, gained):
    mean, value = judged(params, played.seen)
    ratio = jnp.exp(log_density(params, played.force, mean) - played.density)
    scaled = (gained - gained.mean()) / (gained.std() + 1e-6)
    near = jnp.clip(ratio, 0.8, 1.2) * scaled
    of_policy = -jnp.minimum(ratio * scaled, near).mean()
    of_value = jnp.mean((value - (gained + played.value)) ** 2)
    return of_policy + 0.5 * of_value - 0.01 * params["log_spread"]


def make(size: str):
    s = of_size(size, small=Size(3, 5, 8), big=Size(2048, 128, 256))
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4, eps=1e-5))

    def step(state, key):
        params, moments, world = state
        world, played = rollout(params, world, key, s.length)
        gained = advantages(played, judged(params, observed(world))[1])

        def epoch(carry, _):
            params, moments = carry
            value, grads = jax.value_and_grad(loss)(params, played, gained)
            updates, moments = tx.update(grads, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        carry = params, moments
        (params, moments), values = jax.lax.scan(epoch, carry, None, length=4)
        return (params, moments, world), values[-1]

    def init(key):
        k = jax.random.split(key, 5)
        params = {
            "in": dense(k[0], 3, s.width),
            "bias": jnp.zeros(s.width),
            "middle": dense(k[1], s.width, s.width),
            "out": 0.1 * dense(k[2], s.width, 2),
            "log_spread": jnp.asarray(-0.5),
        }
        angle, speed = jax.random.normal(k[3], (2, s.worlds))
        return (params, tx.init(params), (angle, speed)), k[4]

    return step, arguments(size, init), (0,)
