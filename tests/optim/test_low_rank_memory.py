"""GaLore's micro-batches are added up in the subspace: bytes, and the same result."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.accumulate import microbatch
from jaxmem.optim import accumulate_step, apply_step, galore

LAYERS, WIDTH, BATCH, N, RANK, LR = 8, 128, 16, 4, 8, 1e-2
SHAPE = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
TREE = LAYERS * WIDTH * WIDTH * 4


def loss(params, batch, rng):
    """A scanned stack of layers, each recomputed in the backward pass."""

    @jax.checkpoint
    def layer(x, w):
        return x + jnp.tanh(x @ w), None

    return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)


def report(tx):
    step = microbatch(loss, tx, N)
    batch = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    args = SHAPE, jax.eval_shape(tx.init, SHAPE), batch, None
    return step.plan(*args), jaxmem.estimate(step, *args, target="cpu")


CODES = pytest.param({"projector_dtype": "int8", "lazy": True}, marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [{}, CODES], ids=["float32", "int8"])
def test_no_array_of_all_gradients(options):
    """Where the sum of gradients was are sums in the subspace and arrays of a layer."""
    _, whole = report(galore(LR, RANK, **options))
    plan, low = report(galore(LR, RANK, **options, micro_batches=N))
    # each layer's gradient in the backward scan, each layer's update in the last one
    assert plan.released_bytes >= 2 * TREE, str(plan)
    assert plan.kept_bytes == 0
    assert whole.temp_bytes > TREE
    assert low.temp_bytes < TREE / 2
    assert low.alias_bytes >= TREE
    more = low.argument_bytes - whole.argument_bytes
    assert more == pytest.approx(TREE * RANK / WIDTH, abs=64)  # and some counters


def by_hand(tx, params, state, batch):
    for i in range(N):
        grads = jax.grad(loss)(params, batch[i::N], None)
        state = accumulate_step(tx, grads, state, params, micro_batches=N)
    updates, state = apply_step(tx, state, params)
    return optax.apply_updates(params, updates), state


def test_scheduled_as_written():
    """A refresh in the loop over micro-batches, in the backward scan, a layer each."""
    tx = galore(LR, RANK, 2, inner=optax.trace(0.9), micro_batches=N)
    draw = np.random.default_rng(0).standard_normal
    params = jnp.asarray(0.1 * draw((LAYERS, WIDTH, WIDTH)), jnp.float32)
    # more examples a micro-batch than the rank: the gradient has all vectors
    batch = jnp.asarray(draw((4 * BATCH, WIDTH)), jnp.float32)
    step = microbatch(loss, tx, N, donate=False)
    plain = jax.jit(functools.partial(by_hand, tx))
    got = want = params, tx.init(params)
    for _ in range(3):
        got, want = step(*got, batch, None)[:2], plain(*want, batch)
    moved = jnp.abs(want[0] - params).max()
    # sums of another order turn the vectors of a projector by about 1e-4 of themselves
    chex.assert_trees_all_close(got[0], want[0], atol=1e-3 * float(moved))
    assert [int(x) for x in got[1][0][:3]] == [3, 0, N]
