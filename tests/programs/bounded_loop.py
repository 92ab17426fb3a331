"""A differential equation by steps of adapted length, in a bounded while loop.

Such a loop, which can be differentiated in reverse, is a scan of chunks: each does its
steps if the end is not reached, else nothing (Kidger 2021). Chunks are recomputed.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, of_size


class Size(NamedTuple):
    batch: int
    width: int
    chunks: int
    steps: int


class Field(eqx.Module):
    """A vector field with a gate, for one example."""

    inner: eqx.nn.Linear
    outer: eqx.nn.Linear
    rate: jax.Array

    def __init__(self, width: int, key):
        inner, outer = jax.random.split(key)
        self.inner = eqx.nn.Linear(width, width, key=inner)
        self.outer = eqx.nn.Linear(width, width, key=outer)
        self.rate = jnp.zeros(())

    def __call__(self, y):
        return jnp.exp(self.rate) * jnp.tanh(self.outer(jnp.tanh(self.inner(y))))


def bounded(advance, unfinished, carry, chunks: int, steps: int):
    """`advance` while `unfinished`, at most `chunks * steps` times."""

    def run(carry):
        body = lambda carry, _: (advance(carry), None)
        return jax.lax.scan(body, carry, None, length=steps)[0]

    @jax.checkpoint
    def chunk(carry, _):
        return jax.lax.cond(unfinished(carry), run, lambda c: c, carry), None

    return jax.lax.scan(chunk, carry, None, length=chunks)[0]


def make(size: str):
    s = of_size(size, small=Size(3, 5, 3, 2), big=Size(4096, 512, 8, 8))
    tx = optax.adabelief(1e-3)

    def advance(carry):
        field, y, t = carry
        slope = jax.vmap(field)(y)
        # one length for all examples, smaller where the slope is large
        h = jnp.minimum(0.3 / (1 + jnp.sqrt(jnp.mean(slope**2))), 1 - t)
        middle = jax.vmap(field)(y + h / 2 * slope)
        return field, y + h * middle, t + h

    def loss(field, y, end):
        params, static = eqx.partition(field, eqx.is_array)

        def inner(carry):
            params, y, t = carry
            _, y, t = advance((eqx.combine(params, static), y, t))
            return params, y, t

        start = params, y, jnp.zeros(())
        done = bounded(inner, lambda c: c[2] < 1, start, s.chunks, s.steps)
        return jnp.mean((done[1] - end) ** 2)

    @eqx.filter_jit
    def step(state, y, end):
        field, moments = state
        value, grads = eqx.filter_value_and_grad(loss)(field, y, end)
        updates, moments = tx.update(grads, moments, field)
        return (eqx.apply_updates(field, updates), moments), value

    def init(key):
        k = jax.random.split(key)
        field = Field(s.width, k[0])
        y, end = jax.random.normal(k[1], (2, s.batch, s.width))
        return (field, tx.init(eqx.filter(field, eqx.is_array))), y, end

    return step, arguments(size, init), (0,)
