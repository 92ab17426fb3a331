"""SampledDense and VeLoRADense: Flax's parameters and outputs, fewer bytes kept."""

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

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


def test_a_product_of_ones_own_is_refused():
    product = jax.lax.dot_general
    with pytest.raises(ValueError, match="dot_general"):
        lean_linen.SampledDense(4, dot_general=product).init(jax.random.key(0), X)
    _, lean = nnx_pair(lean_nnx.VeLoRADense, groups=2)
    with pytest.raises(ValueError, match="out_sharding"):
        lean(X, out_sharding=jax.sharding.PartitionSpec())
