"""Gradients as rows: added in place, across transformations, and never by mistake."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxmem.optim import RowGradients, lazy_adam, value_and_row_grad
from tests.arrays import array
from tests.optim.rows.problem import LR, batches, loss, params, train_step
from tests.optim.rows.problem import TABLE as TABLE_PATH

TABLE = array(np.random.default_rng(0).standard_normal((10, 3)), "f4")
IDS = array([4, 1, 4, 10, -1, 1], "i4")
ROWS = array(np.arange(18).reshape(6, 3), "f4")
GRADIENT = RowGradients(IDS, ROWS, TABLE.shape)
DENSE = np.zeros((10, 3), "f4")
np.add.at(DENSE, [4, 1, 4, 1], np.asarray(ROWS)[[0, 1, 2, 5]])


@pytest.mark.parametrize("summed", [False, True])
def test_is_the_dense_one(summed):
    gradient = GRADIENT.summed() if summed else GRADIENT
    np.testing.assert_array_equal(gradient.todense(), DENSE)
    np.testing.assert_allclose(TABLE + gradient, TABLE + DENSE, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(TABLE) + gradient, TABLE + DENSE, rtol=1e-6)
    got = jax.jit(optax.apply_updates)({"a": TABLE}, {"a": gradient})
    np.testing.assert_allclose(got["a"], TABLE + DENSE, rtol=1e-6)


def test_summed_has_each_id_once_and_zeros_in_empty_slots():
    summed = GRADIENT.summed()
    np.testing.assert_array_equal(summed.ids[:2], [1, 4])
    assert len(set(summed.ids.tolist())) == 6 and (summed.ids[2:] >= 10).all()
    assert not summed.rows[2:].any() and summed.summed() is summed


def test_without_ids():
    none = RowGradients(jnp.zeros(0, jnp.int32), jnp.zeros((0, 3)), TABLE.shape)
    np.testing.assert_array_equal(TABLE + none.summed(), TABLE)


def test_a_narrow_table_is_rounded_once():
    """As `optax.apply_updates` does: the sum is in float32."""
    table = TABLE.astype(jnp.bfloat16)
    ids = jnp.array([2])
    update = RowGradients(ids, jnp.full((1, 3), 2.0**-12), TABLE.shape).summed()
    wide = table.astype(jnp.float32) + update.todense()
    assert (table + update).dtype == jnp.bfloat16
    np.testing.assert_array_equal(table + update, wide.astype(jnp.bfloat16))


def test_is_a_pytree_through_jit_scan_and_vmap():
    passed = jax.jit(lambda g: jax.tree.map(lambda x: x, g))(GRADIENT)
    np.testing.assert_array_equal(passed.ids, GRADIENT.ids)
    table, _ = jax.lax.scan(lambda t, _: (t + GRADIENT, None), TABLE, None, length=2)
    np.testing.assert_allclose(table, TABLE + 2 * DENSE, rtol=1e-6)
    many = jax.vmap(lambda rows: RowGradients(IDS, rows, TABLE.shape))(ROWS[None])
    np.testing.assert_array_equal(many.rows[0], ROWS)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(GRADIENT)]
    assert paths == [".ids", ".rows"]


OUTSIDE = {
    "clip": optax.clip(1.0),
    "clip_by_global_norm": optax.clip_by_global_norm(1.0),
    "scale": optax.scale(-1.0),
    "adam": optax.scale_by_adam(),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_transformation_that_maps_over_leaves_fails(name):
    """It would change which rows are meant."""
    tx = OUTSIDE[name]
    errors = TypeError, ValueError, NotImplementedError  # JAX's, for keys
    with jax.numpy_dtype_promotion("standard"), pytest.raises(errors):
        tx.update({"a": GRADIENT}, tx.init({"a": TABLE}), {"a": TABLE})


def test_rows_of_all_devices():
    """On a table that each device has, in place of a sum over devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    ids = jnp.arange(16) % 5
    rows = jnp.arange(48.0).reshape(16, 3)

    def step(table, ids, rows):
        mine = RowGradients(ids, -LR * rows, table.shape)
        return table + mine.all_gather("data").summed()

    spec = PartitionSpec("data")
    sharded = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(PartitionSpec(), spec, spec),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    got = jax.jit(sharded)(TABLE, ids, rows)
    want = TABLE.at[ids].add(-LR * rows)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_another_table_is_refused():
    with pytest.raises(ValueError, match=r"table=float32\[2,3\]: one of the shape"):
        jnp.ones((2, 3)) + GRADIENT


def test_data_parallel_lazy_adam_is_that_of_the_whole_batch():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx, given = lazy_adam(LR), params()
    grad = value_and_row_grad(loss, TABLE_PATH)

    def step(carry, ids):
        params, state = carry
        _, grads = grad(params, ids)
        table = grads["embed"]["table"].all_gather("data")
        grads = {
            "embed": {"table": table.with_rows(table.rows / 8)},
            "w": jax.lax.pmean(grads["w"], "data"),
        }
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    everywhere = PartitionSpec()
    sharded = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(everywhere, PartitionSpec("data")),
        out_specs=everywhere,
        check_vma=False,
    )
    with jax.numpy_dtype_promotion("standard"):  # for optax
        got = want = given, tx.init(given)
        for ids in batches(3):
            got = jax.jit(sharded)(got, ids)
            want, _ = jax.jit(train_step(tx))(want, ids)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
