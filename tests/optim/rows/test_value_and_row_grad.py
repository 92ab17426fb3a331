"""Gradients as rows are those of `jax.grad`, whatever the model looks like."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jaxmem import ops, optim
from tests.optim.rows.problem import TABLE, WIDTH, batches, params

IDS = batches(1)[0].reshape(4, 6)
POSITIVE = jnp.abs(IDS)


def check(loss, *args, tables=TABLE, given=None):
    """Value and gradients; returns those as rows."""
    given = params() if given is None else given
    value, rows = jax.jit(optim.value_and_row_grad(loss, tables))(given, *args)
    plain, dense = jax.jit(jax.value_and_grad(loss))(given, *args)
    np.testing.assert_allclose(value, plain, rtol=1e-6)
    is_rows = lambda x: isinstance(x, optim.RowGradients)
    leaves = jax.tree.leaves(rows, is_leaf=is_rows)
    full = [x.todense() if is_rows(x) else x for x in leaves]
    for x, y in zip(full, jax.tree.leaves(dense), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    return [x for x in leaves if is_rows(x)]


def through(read):
    def loss(params, ids):
        return jnp.mean(
            jnp.tanh(read(params["embed"]["table"], ids) @ params["w"]) ** 2
        )

    return loss


READS = {
    "embed": ops.embed,
    "bag": ops.embedding_bag,
    "largest of a bag": lambda t, ids: ops.embedding_bag(t, ids, mode="max"),
    "take": lambda t, ids: jnp.take(t, ids, axis=0),
    "index": lambda t, ids: t[ids],
    "clipped": lambda t, ids: t.at[ids].get(mode="clip"),
    "in bounds": lambda t, ids: t.at[ids % 200].get(mode="promise_in_bounds"),
    "twice": lambda t, ids: t[ids] + ops.embed(t, ids + 1),
    "mapped": lambda t, ids: jax.vmap(lambda i: t[i])(ids),
    "sliced": lambda t, ids: jax.vmap(jax.vmap(lambda i: t[i]))(ids),
    "recomputed": jax.checkpoint(lambda t, ids: jnp.sin(t[ids])),
    "one id": lambda t, ids: ops.embed(t, ids[0, 0])[None],
    "one index": lambda t, ids: (t[ids[0, 0]] + t[ids[0, 1]])[None],
}


@pytest.mark.parametrize("name", READS)
def test_as_the_dense_gradient(name):
    (rows,) = check(through(READS[name]), IDS)
    assert rows.rows.shape[1:] == (WIDTH,) and rows.ids.dtype == jnp.int32


def test_ids_out_of_range_have_no_rows():
    read = lambda t, ids: jnp.nan_to_num(ops.embed(t, ids))
    check(through(read), jnp.array([[1, 500, -500]]))


def test_a_table_in_a_narrower_dtype_sums_there():
    read = lambda t, ids: t.astype(jnp.bfloat16)[ids].astype(jnp.float32)
    loss = through(read)
    _, grads = jax.jit(optim.value_and_row_grad(loss, TABLE))(params(), IDS)
    dense = jax.jit(jax.grad(loss))(params(), IDS)["embed"]["table"]
    got = grads["embed"]["table"].todense()
    # the order of up to 24 sums in bfloat16
    np.testing.assert_allclose(got, dense, rtol=24 * 2.0**-8, atol=1e-5)
    assert got.dtype == jnp.float32


def test_a_table_that_is_not_read_has_no_rows():
    given = {**params(), "other": jnp.ones((5, 2))}
    loss = through(ops.embed)
    tables = {"embed": True, "w": False, "other": True}
    tx = optim.rowwise(optax.adagrad(0.1))

    @jax.jit
    def step(given):
        _, grads = optim.value_and_row_grad(loss, tables)(given, IDS)
        updates, _ = tx.update(grads, tx.init(given), given)
        return grads, optax.apply_updates(given, updates)

    grads, new = step(given)
    assert grads["other"].rows.shape == (0, 2)
    np.testing.assert_array_equal(new["other"], given["other"])


def test_auxiliary_output_and_keywords():
    def loss(params, ids, *, scale):
        y = scale * params["embed"]["table"][ids] @ params["w"]
        return jnp.mean(y**2), {"y": y}

    grad = optim.value_and_row_grad(loss, TABLE, has_aux=True)
    (_, aux), grads = grad(params(), IDS, scale=2.0)
    assert aux["y"].shape == (*IDS.shape, WIDTH)
    assert isinstance(grads["embed"]["table"], optim.RowGradients)


def tied(params, ids):
    table = params["embed"]["table"]
    return jnp.mean((table[ids] @ table.T) ** 2)


def test_dense_gradients_are_refused_by_name():
    with pytest.raises(ValueError, match="'embed/table' is dense: `transpose`"):
        optim.value_and_row_grad(tied, TABLE)(params(), IDS)


def test_a_pattern_that_matches_nothing():
    with pytest.raises(ValueError, match="'tabel' matches no path"):
        optim.value_and_row_grad(tied, "tabel")(params(), IDS)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, ids):
        return linen.Dense(3)(linen.Embed(50, WIDTH)(ids))


def test_linen():
    model = Linen()
    given = model.init(jax.random.key(0), POSITIVE)
    loss = lambda params, ids: jnp.mean(model.apply(params, ids) ** 2)
    check(loss, POSITIVE, tables="params/Embed_0", given=given)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(50, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, ids):
        return self.head(self.embed(ids))


def test_nnx_with_its_optimizer():
    """The model is a pytree; a plain Adam differs in the rows that are not read."""
    models = [Nnx(nnx.Rngs(0)) for _ in range(2)]
    loss = lambda model, ids: jnp.mean(model(ids) ** 2)
    with jax.numpy_dtype_promotion("standard"):  # for optax
        lazy = nnx.Optimizer(models[0], optim.lazy_adam(0.1), wrt=nnx.Param)
        plain = nnx.Optimizer(models[1], optax.adam(0.1), wrt=nnx.Param)

        @nnx.jit
        def ours(model, optimizer, ids):
            value, grads = optim.value_and_row_grad(loss, "embed/**")(model, ids)
            optimizer.update(model, grads)
            return value

        @nnx.jit
        def theirs(model, optimizer, ids):
            value, grads = nnx.value_and_grad(loss)(model, ids)
            optimizer.update(model, grads)
            return value

        for _ in range(2):
            got = ours(models[0], lazy, POSITIVE)
            want = theirs(models[1], plain, POSITIVE)
    assert float(got) == pytest.approx(float(want), rel=1e-5)
    states = [jax.tree.leaves(nnx.as_pure(nnx.state(m))) for m in models]
    for x, y in zip(*states, strict=True):
        # the same ids in both steps: no row waits
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
