"""Memformer's replay through time: an LSTM over thousands of steps."""

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._common import size_and_ms
from benchmarks.headline.claim import Pair
from benchmarks.headline.measured import SDS
from benchmarks.steps.train import train_step


def lstm_loss(batch: int, width: int, wrap=lambda body: body):
    """An LSTM's loss, as anyone writes it, and its weights.

    `wrap`: changes what is scanned over the inputs.
    """

    def cell(weights, carry, x):
        h, memory = carry
        z = jnp.concatenate([x, h], -1) @ weights["w"] + weights["b"]
        i, f, g, o = jnp.split(z, 4, -1)
        memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(memory)
        return (h, memory), h

    def loss(weights, xs):
        zeros = jnp.zeros((batch, width))
        body = wrap(lambda carry, x: cell(weights, carry, x))
        (h, _), _ = jax.lax.scan(body, (zeros, zeros), xs)
        return (h @ weights["out"]).mean()

    f32 = lambda *shape: SDS(shape, jnp.float32)
    return loss, {
        "w": f32(2 * width, 4 * width),
        "b": f32(4 * width),
        "out": f32(width, 1),
    }


def lstm_step(steps: int = 4096, batch: int = 64, width: int = 512):
    """Its step with Adam, and the arguments."""
    loss, weights = lstm_loss(batch, width)
    tx = optax.adam(1e-3)

    state = weights, jax.eval_shape(tx.init, weights)
    return train_step(loss, tx), (state, SDS((steps, batch, width), jnp.float32))


def replay(budget: str = "620MiB") -> Pair:
    step, args = lstm_step()
    plan = jaxmem.schedule(step, budget, target="h100", donate_argnums=0).plan(*args)
    before, after = (
        size_and_ms(report, "peak_bytes") for report in (plan.plain, plan.scheduled)
    )
    return before, after
