"""GaLore's micro-batches are added up in the subspace: bytes, and the same result."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.accumulate import microbatch
from jaxmem.optim import galore

LAYERS, WIDTH, BATCH, N, RANK = 8, 128, 16, 4, 8
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


@pytest.mark.parametrize("options", [{}, {"projector_dtype": "int8", "lazy": True}])
def test_no_array_of_all_gradients(options):
    """The sum of gradients, and all that is not: projected sums and a layer's arrays."""
    _, whole = report(galore(1e-2, RANK, **options))
    plan, low = report(galore(1e-2, RANK, **options, micro_batches=N))
    assert plan.released_bytes == TREE, str(plan)
    assert whole.temp_bytes > TREE
    assert low.temp_bytes < TREE / 2
    assert low.alias_bytes >= TREE
    more = low.argument_bytes - whole.argument_bytes
    assert more == pytest.approx(TREE * RANK / WIDTH, abs=64)  # and some counters


@pytest.mark.parametrize("n", [1, N])
def test_scheduled_as_written(n):
    """A refresh in the loop over micro-batches, in the backward scan, a layer each."""
    tx = galore(1e-2, RANK, 2, micro_batches=N)
    values = np.random.default_rng(0).standard_normal((LAYERS, WIDTH, WIDTH))
    params = jnp.asarray(0.1 * values, jnp.float32)
    batch = jnp.asarray(np.random.default_rng(1).standard_normal((BATCH, WIDTH)))
    batch = batch.astype(jnp.float32)
    make = lambda schedule: microbatch(loss, tx, n, donate=False, schedule=schedule)
    steps = [make(schedule) for schedule in (True, False)]
    states = [(params, tx.init(params))] * 2
    for _ in range(3):
        states = [
            step(*s, batch, None)[:2] for step, s in zip(steps, states, strict=True)
        ]
    # Adam's first steps have the size of the rate whatever the gradient's, and what is
    # nearly 0 is rounded otherwise in a sum of another order
    chex.assert_trees_all_close(states[0][0], states[1][0], atol=1e-3 * 1e-2)
    assert [int(x) for x in states[0][1][0][:3]] == [3, 0, n]
