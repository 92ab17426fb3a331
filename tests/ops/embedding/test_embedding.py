"""Lookups: ids out of range, of every dtype, and gradients that are seen as rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import ops
from jaxmem.ir import jaxprs

ROWS = 300
TABLE = jax.random.normal(jax.random.key(0), (ROWS, 3))
OUTSIDE = jnp.array([1, ROWS, -ROWS, -ROWS - 1])


def bag_of_one(table, ids, **options):
    return ops.embedding_bag(table, ids[:, None], **options)


LOOKUPS = pytest.mark.parametrize("lookup", [ops.embed, bag_of_one])


@LOOKUPS
def test_ids_out_of_range_are_named(lookup):
    with pytest.raises(ValueError, match=rf"ids=.*-301, 300 in a table of {ROWS} rows"):
        lookup(TABLE, OUTSIDE)


@LOOKUPS
def test_traced_ids_out_of_range_give_nan_and_no_gradient(lookup):
    value = lambda table, ids: jnp.nansum(lookup(table, ids))
    got = jax.jit(lookup)(TABLE, OUTSIDE)
    np.testing.assert_array_equal(jnp.isnan(got[:, 0]), [False, True, False, True])
    np.testing.assert_array_equal(got[2], TABLE[0])
    filled = lookup(TABLE, OUTSIDE, out_of_range="fill")
    np.testing.assert_array_equal(filled, jnp.take(TABLE, OUTSIDE, axis=0))
    grad = jax.jit(jax.grad(value))(TABLE, OUTSIDE)
    want = jnp.zeros_like(TABLE).at[jnp.array([0, 1])].set(1.0)
    np.testing.assert_array_equal(grad, want)


@LOOKUPS
def test_clipped_ids_are_those_of_the_nearest_rows(lookup):
    """Negative ids wrap first, which `jnp.take(mode="clip")` does not."""
    clipped = lambda table: lookup(table, OUTSIDE, out_of_range="clip")
    got, pull = jax.vjp(clipped, TABLE)
    np.testing.assert_array_equal(got, TABLE[jnp.array([1, ROWS - 1, 0, 0])])
    grad = pull(jnp.ones_like(got))[0]
    np.testing.assert_array_equal(grad[:2, 0], [2, 1])
    assert grad[-1, 0] == 1


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int32"])
def test_ids_of_every_dtype(dtype):
    """An int8 cannot hold the number of rows that is added to a negative id."""
    ids = np.array([0, 5, 127], dtype)
    np.testing.assert_array_equal(ops.embed(TABLE, ids), TABLE[jnp.array([0, 5, 127])])
    if np.iinfo(dtype).min < 0:
        got = ops.embed(TABLE, np.array([-1, -128], dtype))
        np.testing.assert_array_equal(got, TABLE[jnp.array([-1, -128])])
    else:
        largest = np.array([np.iinfo(dtype).max], dtype)
        inside = np.iinfo(dtype).max < ROWS
        assert bool(jnp.isfinite(jax.jit(ops.embed)(TABLE, largest)).all()) == inside


def test_one_id_and_tables_of_any_rank():
    np.testing.assert_array_equal(ops.embed(TABLE, -1), TABLE[-1])
    np.testing.assert_array_equal(ops.embed(TABLE[:, 0], jnp.array([2])), TABLE[2:3, 0])
    cube = TABLE.reshape(ROWS, 3, 1)
    ids = jnp.array([[1, 2]])
    np.testing.assert_array_equal(ops.embed(cube, ids), cube[ids])
    np.testing.assert_allclose(ops.embedding_bag(cube, ids), cube[1:2] + cube[2:3])


def test_a_bag_is_filled_up_with_weights_of_zero():
    ids, weights = jnp.array([[4, 7, 0]]), jnp.array([[1.0, 1.0, 0.0]])
    got = ops.embedding_bag(TABLE, ids, weights, mode="mean")
    np.testing.assert_allclose(got[0], (TABLE[4] + TABLE[7]) / 2, rtol=1e-6)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bags_gradient_is_a_scatter_add(mode):
    """Outside of any recomputation, where `schedule` and an optimizer see it."""
    ids = jnp.array([[1, 2], [1, 1]])
    loss = lambda table: jnp.sum(ops.embedding_bag(table, ids, mode=mode) ** 2)
    closed = jax.make_jaxpr(jax.grad(loss))(TABLE)
    assert "scatter-add" in {eqn.primitive.name for eqn in closed.jaxpr.eqns}


def test_a_bags_rows_are_looked_up_anew():
    """XLA would otherwise take those of the forward pass, and keep them."""
    ids, weights = jnp.array([[1, 2]]), jnp.ones((1, 2))
    loss = lambda w: jnp.sum(ops.embedding_bag(TABLE, ids, w) ** 2)
    closed = jax.make_jaxpr(jax.grad(loss))(weights)
    found = [eqn.primitive.name for eqn in jaxprs.walk(closed)]
    assert found.count("gather") == 2 and "optimization_barrier" in found


def test_forward_mode():
    ids, weights = jnp.array([[1, 2, 1]]), jnp.array([[0.5, 2.0, 1.0]])
    bag = lambda table, weights: ops.embedding_bag(table, ids, weights)
    plain = lambda table, weights: jnp.einsum("bi,bid->bd", weights, table[ids])
    dots = jnp.ones_like(TABLE), jnp.full_like(weights, 2.0)
    for got, want in zip(
        jax.jvp(bag, (TABLE, weights), dots),
        jax.jvp(plain, (TABLE, weights), dots),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6)
