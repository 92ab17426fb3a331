"""A simulator of particles that is differentiated: forces are fitted to trajectories.

Steps of observation, in each a scan of shorter steps in time; forces between all pairs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, of_size, training_step


class Size(NamedTuple):
    worlds: int
    particles: int
    observed: int
    inner: int


def forces(params, x):
    """Sums over the other particles: repelled when near, attracted when far."""
    apart = x[:, None] - x[None]
    distance = jnp.sqrt((apart**2).sum(-1) + 1e-2)
    push = params["strength"] * jnp.tanh(distance - params["rest"]) / distance
    return -(apart * push[..., None]).sum(axis=1)


def trajectory(params, start, observed: int, inner: int, h=0.02):
    """Positions [T, N, 3] at the observed times."""

    def advance(state, _):
        x, v = state
        v = v + h * (forces(params, x) - params["drag"] * v)
        return (x + h * v, v), None

    def between(state, _):
        state, _ = jax.lax.scan(advance, state, None, length=inner)
        return state, state[0]

    return jax.lax.scan(between, start, None, length=observed)[1]


def make(size: str):
    s = of_size(size, small=Size(2, 4, 3, 3), big=Size(256, 32, 32, 8))
    tx = optax.rmsprop(1e-2)

    def loss(params, start, seen):
        run = lambda *start: trajectory(params, start, s.observed, s.inner)
        return jnp.mean((jax.vmap(run)(*start) - seen) ** 2)

    def init(key):
        k = jax.random.split(key, 3)
        params = {
            "strength": jnp.asarray(1.0),
            "rest": jnp.asarray(0.8),
            "drag": jnp.asarray(0.1),
        }
        x = jax.random.normal(k[0], (s.worlds, s.particles, 3))
        seen = jax.random.normal(k[1], (s.worlds, s.observed, s.particles, 3))
        return (params, tx.init(params)), (x, jnp.zeros_like(x)), seen

    return training_step(loss, tx), arguments(size, init), (0,)
