"""Micro-batches of a batch: which examples, on which devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem.accumulate import microbatch
from jaxmem.accumulate._trees import split_batch
from jaxmem.optim import adama
from tests.accumulate import problem
from tests.accumulate.problem import LR, RTOL, assert_close

KINDS = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)


def sharded(batch, kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))


def test_micro_batch_i_holds_every_nth_example():
    batch = {
        "x": jnp.arange(12 * 2).reshape(12, 2),
        "key": jax.random.split(jax.random.key(0), 12),
    }
    got = split_batch(batch, 3)
    for i in range(3):
        np.testing.assert_array_equal(got["x"][i], batch["x"][i::3])
        assert (got["key"][i] == batch["key"][i::3]).all()


def test_numpy_leaves():
    assert split_batch(np.zeros((4, 3)), 2).shape == (2, 2, 3)


@KINDS
def test_a_sharded_batch_stays_where_it_is(kind):
    """Each device holds B/8 examples, of which n-th parts go to each micro-batch."""
    batch = sharded(jnp.arange(32.0).reshape(32, 1), kind)
    compiled = jax.jit(lambda x: split_batch(x, 4)).lower(batch).compile()
    out = compiled(batch)
    assert out.sharding.spec[:2] == (None, "data")
    text = compiled.as_text()
    moves = ("all-gather", "all-to-all", "collective-permute", "all-reduce")
    assert not any(word in text for word in moves)


@pytest.mark.fast("adama-explicit", "adam-auto")
@KINDS
@pytest.mark.parametrize("tx", [adama(LR), optax.adam(LR)], ids=["adama", "adam"])
def test_data_parallel(tx, kind):
    """As on one device, and gradients are all that is communicated."""
    n, batch = 4, problem.batch(32)
    step = microbatch(problem.loss, tx, n, donate=False)
    state = tx.init(problem.params())
    want = step(problem.params(), state, batch, None)
    spread = sharded(batch, kind)
    whole = NamedSharding(spread["x"].sharding.mesh, PartitionSpec())
    params, state = jax.device_put((problem.params(), state), whole)
    step = microbatch(problem.loss, tx, n, donate=False)
    got = step(params, state, spread, None)
    assert_close(got, want, atol=LR * RTOL)
    assert all(
        x.sharding.is_equivalent_to(whole, x.ndim) for x in jax.tree.leaves(got[:2])
    )
    text = step.lower(params, state, spread, None).compile().as_text()
    assert "all-reduce" in text
    moves = ("all-gather", "all-to-all", "collective-permute")
    assert not any(word in text for word in moves)
