"""Accumulation by hand beside `microbatch`: the same where micro-batches are."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem

N, ROWS, WIDTH = 4, 16, 32
TX = optax.adam(1e-3)
BF16 = jnp.bfloat16


def loss(params, x, key):
    """In mixed precision, with biases and dropout."""
    p = jax.tree.map(lambda w: w.astype(BF16), params)
    h = jax.nn.gelu(x.astype(BF16) @ p["up"] + p["bias"][None])
    h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0).astype(BF16)
    return jnp.mean(jnp.square((h @ p["down"] + x.astype(BF16)).astype(jnp.float32)))


def by_hand(order, params, state, x, key):
    def add(total, part):
        _, grads = jax.value_and_grad(loss)(params, *part)
        return jax.tree.map(lambda t, g: t + g / N, total, grads), None

    parts = order(x.reshape(N, -1, WIDTH), x.reshape(-1, N, WIDTH).swapaxes(0, 1))
    zeros = jax.tree.map(jnp.zeros_like, params)
    grads, _ = jax.lax.scan(add, zeros, (parts, jax.random.split(key, N)))
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def in_blocks(*args):
    return by_hand(lambda blocks, strided: blocks, *args)


def strided(*args):
    return by_hand(lambda blocks, strided: strided, *args)


def microbatched(*args):
    return jaxmem.microbatch(loss, TX, N)(*args)[:2]


@pytest.mark.parametrize("reference, agrees", [(strided, True), (in_blocks, False)])
def test_micro_batches_of_the_same_examples_agree(reference, agrees):
    """Dropout masks fall on other examples where micro-batches are of other ones."""
    up, down, b, x = jax.random.split(jax.random.key(0), 4)
    params = {
        "up": jax.random.normal(up, (WIDTH, WIDTH)) / WIDTH,
        "bias": 0.05 * jax.random.normal(b, (WIDTH,)),
        "down": jax.random.normal(down, (WIDTH, WIDTH)) / WIDTH,
    }
    x = 0.3 * jax.random.normal(x, (ROWS, WIDTH))
    args = params, TX.init(params), x, jax.random.key(1)
    report = jaxmem.check(microbatched, reference, *args, steps=2)
    assert bool(report) == agrees, str(report)
    worst = max(leaf.ratio for leaf in report.leaves)
    assert len(report.leaves) == 10 and (worst < 0.5 if agrees else worst > 10), worst
