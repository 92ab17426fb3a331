"""SampledDense and VeLoRADense: Flax's parameters and outputs, fewer bytes kept."""

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from jaxmem import ops
from jaxmem.nn import linen as lean_linen
from jaxmem.nn import nnx as lean_nnx
from tests.arrays import array
from tests.nn.compare import assert_trees_identical, initialized, kept_bytes

X = array(np.random.default_rng(0).standard_normal((2, 10, 8)), "float32")
RNGS = {"sampling": jax.random.key(1)}


@pytest.mark.parametrize("use_bias", [True, False])
def test_linen_parameters_and_outputs_are_those_of_dense(use_bias):
    plain = nn.Dense(4, use_bias=use_bias)
    variables = initialized(plain, X)
    sampled = lean_linen.SampledDense(4, use_bias=use_bias)
    assert_trees_identical(initialized(sampled, X), variables)
    velora = lean_linen.VeLoRADense(4, use_bias=use_bias, groups=2)
    own = initialized(velora, X)
    assert_trees_identical(own["params"], variables["params"])
    want = plain.apply(variables, X)
    np.testing.assert_array_equal(sampled.apply(variables, X, rngs=RNGS), want)
    np.testing.assert_array_equal(velora.apply(own, X), want)


def test_linen_keeps_a_part():
    layer = lean_linen.SampledDense(4, budget=0.3)
    variables = initialized(layer, X)
    fn = lambda v: layer.apply(v, X, rngs=RNGS)
    assert kept_bytes(fn, variables) == 6 * (8 * 4 + 4)
    velora = lean_linen.VeLoRADense(4, groups=2)
    own = initialized(velora, X)
    fn = lambda p: velora.apply({"params": p, "velora": own["velora"]}, X)
    assert kept_bytes(fn, own["params"]) == 20 * 2 * 4 + 4 * 4


def test_linen_needs_a_key_or_deterministic():
    layer = lean_linen.SampledDense(4)
    variables = initialized(layer, X)
    with pytest.raises(flax.errors.InvalidRngError, match="sampling"):
        layer.apply(variables, X)
    layer.apply(variables, X, deterministic=True)
    lean_linen.SampledDense(4, deterministic=True).apply(variables, X)


def test_linen_in_a_scan_of_layers():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + lean_linen.SampledDense(8, name="dense")(x), None

    layers = nn.scan(
        Block,
        variable_axes={"params": 0},
        split_rngs={"params": True, "sampling": True},
        length=3,
    )()
    variables = initialized(layers, X, None)
    loss = lambda v: layers.apply(v, X, None, rngs=RNGS)[0].sum()
    assert kept_bytes(loss, variables) <= 3 * (6 * (8 * 4 + 4))


def nnx_pair(kind, **options):
    lean = kind(8, 4, rngs=nnx.Rngs(0, sampling=1), **options)
    return nnx.Linear(8, 4, rngs=nnx.Rngs(0)), lean


def test_nnx_parameters_and_outputs_are_those_of_linear():
    for kind in (lean_nnx.SampledDense, lean_nnx.VeLoRADense):
        options = {"groups": 2} if kind is lean_nnx.VeLoRADense else {}
        plain, lean = nnx_pair(kind, **options)
        params = nnx.state(plain, nnx.Param), nnx.state(lean, nnx.Param)
        assert_trees_identical(*map(nnx.to_pure_dict, params))
        np.testing.assert_array_equal(lean(X), plain(X))


def nnx_gradient(model):
    loss = lambda m, x: (m(x) ** 2).sum()
    return nnx.jit(nnx.grad(loss))(model, X)["kernel"][...]


def test_nnx_draws_anew_each_step_and_is_exact_in_evaluation():
    plain, lean = nnx_pair(lean_nnx.SampledDense, budget=0.5)
    exact = nnx_gradient(plain)
    first, second = nnx_gradient(lean), nnx_gradient(lean)
    assert not np.array_equal(first, second)
    assert not np.allclose(first, exact)
    lean.eval()
    np.testing.assert_allclose(nnx_gradient(lean), exact, rtol=1e-5, atol=1e-5)


# -- norms of gradients, kept from step to step

KEYS = jax.random.split(jax.random.key(5), 400)
NORMS = jnp.geomspace(0.01, 10, 20).reshape(2, 10, 1)
GRADIENT = array(np.random.default_rng(1).standard_normal((2, 10, 4)), "float32")
# rows of unequal norms; in the next step of about the same
FIRST, SECOND = GRADIENT * NORMS, GRADIENT[:, ::-1] * NORMS * 1.3


def row_norms(g):
    return jnp.sqrt(jnp.square(g).sum(-1))


def assert_nearer(known, unknown):
    """Mean squared errors of 400 draws, five standard errors of these apart."""
    exact = jnp.einsum("std,stf->df", X, SECOND)
    a, b = (
        np.square(np.asarray(d - exact[None])).sum((1, 2)) for d in (known, unknown)
    )
    assert b.mean() - a.mean() > 5 * np.hypot(a.std(), b.std()) / len(a) ** 0.5


def test_linen_train_state_keeps_norms():
    """Flax's own loop, as it is: the cache comes with the gradients."""
    layer = lean_linen.SampledDense(4, norm_cache=(2, 10))
    variables = layer.init(jax.random.key(0), X)
    state = TrainState.create(
        apply_fn=layer.apply, params=variables, tx=optax.sgd(1e-3)
    )

    @jax.jit
    def gradient(variables, g, key):
        rngs = {"sampling": key}
        loss = lambda v: jnp.vdot(layer.apply(v, X, rngs=rngs), g)
        return jax.grad(loss)(variables)

    after = state.apply_gradients(grads=gradient(state.params, FIRST, KEYS[0]))
    owned = after.params["_overwrite_with_gradient"]
    np.testing.assert_allclose(owned["norm_cache"], row_norms(FIRST), rtol=1e-6)
    many = jax.jit(jax.vmap(gradient, (None, None, 0)))
    draws = lambda variables: many(variables, SECOND, KEYS)["params"]["kernel"]
    assert_nearer(draws(after.params), draws(state.params))
    # evaluation has no need of it
    layer.apply({"params": variables["params"]}, X, deterministic=True)


def test_linen_norms_of_numbered_samples_in_a_scan():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, ids):
            dense = lean_linen.SampledDense(8, norm_cache=(5, 10), name="dense")
            return x + dense(x, sample_ids=ids), None

    layers = nn.scan(
        Block,
        variable_axes={"params": 0, "_overwrite_with_gradient": 0},
        split_rngs={"params": True, "sampling": True},
        in_axes=nn.broadcast,
        length=3,
    )()
    ids = jnp.array([4, 1])
    variables = initialized(layers, X, ids)
    run = lambda v: layers.apply(v, X, ids, rngs=RNGS)[0]
    loss = lambda v: run(v).sum()
    owned = jax.jit(jax.grad(loss))(variables)["_overwrite_with_gradient"]
    got = owned["dense"]["norm_cache"]
    assert got.shape == (3, 5, 10)
    assert (got[:, ids] > 0).all()
    assert not got[:, jnp.array([0, 2, 3])].any()
    np.testing.assert_allclose(got[2, ids], 8**0.5 * jnp.ones((2, 10)), rtol=1e-6)
    rest = variables["_overwrite_with_gradient"]
    frozen = lambda p: run({"params": p, "_overwrite_with_gradient": rest})
    assert kept_bytes(run, variables) == kept_bytes(frozen, variables["params"])


def test_nnx_keeps_norms():
    layer = lean_nnx.SampledDense(8, 4, norm_cache=(3, 10), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(layer, optax.sgd(1e-3), wrt=nnx.Param)
    ids, cache = jnp.array([2, 0]), lean_nnx.NormCache

    @nnx.jit
    def step(layer, optimizer, g):
        loss = lambda layer: jnp.vdot(layer(X, sample_ids=ids), g)
        both = nnx.DiffState(0, nnx.Any(nnx.Param, cache))
        grads = nnx.grad(loss, argnums=both)(layer)
        optimizer.update(layer, nnx.filter_state(grads, nnx.Param))
        nnx.update(layer, nnx.filter_state(grads, cache))

    step(layer, optimizer, FIRST)
    got = layer.norm_cache[...]
    np.testing.assert_allclose(got[ids], row_norms(FIRST), rtol=1e-6)
    assert not got[1].any()

    def draws(norms):
        kernel = layer.kernel[...]
        how = {"norm_cache": norms, "sample_ids": ids}
        of = lambda k, key: jnp.vdot(ops.sampled_dense(X, k, key=key, **how), SECOND)
        return jax.jit(jax.vmap(jax.grad(of), (None, 0)))(kernel, KEYS)

    assert_nearer(draws(got), draws(0 * got))
    layer.eval()
    want = X @ layer.kernel[...] + layer.bias[...][None, None]
    np.testing.assert_allclose(layer(X), want, rtol=1e-5, atol=1e-5)


def test_a_product_of_ones_own_is_refused():
    product = jax.lax.dot_general
    with pytest.raises(ValueError, match="dot_general"):
        lean_linen.SampledDense(4, dot_general=product).init(jax.random.key(0), X)
    _, lean = nnx_pair(lean_nnx.VeLoRADense, groups=2)
    with pytest.raises(ValueError, match="out_sharding"):
        lean(X, out_sharding=jax.sharding.PartitionSpec())
