"""Every linen drop-in against Flax's layer: tree, initial bits, outputs, gradients."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as flax_nn
from jax.lax import conv_general_dilated

from jaxmem.nn import linen as lean_nn
from tests.nn.compare import (
    assert_close,
    assert_trees_identical,
    drawn,
    initialized,
    kept_bytes,
)
from tests.sets import some_fast

LAYERS = [
    ("LayerNorm", {}),
    ("LayerNorm", dict(use_bias=False, use_fast_variance=False)),
    ("LayerNorm", dict(reduction_axes=1, feature_axes=1)),
    ("LayerNorm", dict(scale_init=flax_nn.initializers.normal(1.0), use_bias=False)),
    ("LayerNorm", dict(reduction_axes=(1, 2), feature_axes=-1)),
    ("RMSNorm", {}),
    ("RMSNorm", dict(use_scale=False)),
    ("GroupNorm", dict(num_groups=4)),
    ("GroupNorm", dict(num_groups=None, group_size=2)),
    ("GroupNorm", dict(num_groups=2, reduction_axes=(2,))),
    ("BatchNorm", dict(use_running_average=False)),
    ("BatchNorm", dict(use_running_average=True, axis=1)),
    ("Dense", dict(features=5)),
    ("Dense", dict(features=5, use_bias=False)),
    ("DenseGeneral", dict(features=(3, 4), axis=(-2, -1))),
    ("DenseGeneral", dict(features=4, axis=1)),
    ("Conv", dict(features=4, kernel_size=(3,), strides=2)),
    ("Conv", dict(features=4, kernel_size=(3,), padding="CAUSAL", use_bias=False)),
    ("Conv", dict(features=4, kernel_size=(2, 2), padding="CIRCULAR")),
    ("Dropout", dict(rate=0.5, deterministic=True)),
    ("MultiHeadDotProductAttention", dict(num_heads=4)),
    ("MultiHeadDotProductAttention", dict(num_heads=2, normalize_qk=True)),
    ("MultiHeadAttention", dict(num_heads=4, out_features=6)),
    ("SelfAttention", dict(num_heads=4, use_bias=False)),
]
IDS = [f"{name}-{'-'.join(options)}" for name, options in LAYERS]


def pair(name, options):
    return getattr(flax_nn, name)(**options), getattr(lean_nn, name)(**options)


def run(layer, variables, x, **kwargs):
    def apply(variables, x, kwargs):
        return layer.apply(variables, x, mutable=["batch_stats"], **kwargs)

    return jax.jit(apply)(variables, x, kwargs)


def gradients(layer, variables, x, **kwargs):
    def loss(params, x):
        y, _ = run(layer, {**variables, "params": params}, x, **kwargs)
        return jnp.sum(jnp.sin(y))

    return jax.jit(jax.grad(loss, (0, 1)))(variables.get("params", {}), x)


@pytest.mark.parametrize("name, options", LAYERS, ids=IDS)
def test_equals_flax(name, options):
    plain, lean = pair(name, options)
    x = jax.random.normal(jax.random.key(1), (2, 6, 8))
    variables = initialized(plain, x)
    assert_trees_identical(variables, initialized(lean, x))
    both = lambda layer: lambda v, x: (run(layer, v, x), gradients(layer, v, x))
    assert_close(*(jax.jit(both(layer))(variables, x) for layer in (plain, lean)))
    assert isinstance(lean, type(plain))


@pytest.mark.fast("2-batch0", "3-batch2", "None-batch2")
@pytest.mark.parametrize("batch", some_fast([(), (3,), (2, 3)], (), (2, 3)))
@pytest.mark.parametrize("mask_rank", [2, 3, None])
def test_attention_batch_axes_and_masks(batch, mask_rank):
    plain, lean = pair("MultiHeadDotProductAttention", dict(num_heads=2))
    x = jax.random.normal(jax.random.key(1), (*batch, 5, 8))
    shape = (*batch, 1, 5, 5) if mask_rank is None else (1, 1, 5, 5)[-mask_rank:]
    mask = jax.random.bernoulli(jax.random.key(2), 0.7, shape)
    variables = drawn(plain, x)
    expected = run(plain, variables, x, mask=mask)
    assert_close(expected, run(lean, variables, x, mask=mask))


def test_norm_widens_and_narrows_as_flax():
    with jax.numpy_dtype_promotion("standard"):
        for given, wanted in [("bfloat16", None), ("float32", jnp.bfloat16)]:
            plain, lean = pair("LayerNorm", dict(dtype=wanted))
            x = jax.random.normal(jax.random.key(1), (4, 8)).astype(given)
            variables = drawn(plain, x)
            want, got = plain.apply(variables, x), lean.apply(variables, x)
            assert got.dtype == want.dtype
            error = jnp.max(jnp.abs(want.astype("f4") - got.astype("f4")))
            assert error <= 4 * jnp.finfo(want.dtype).eps * 4  # values stay below 4


def test_dropout_drops_at_its_rate_and_needs_a_key():
    layer = lean_nn.Dropout(0.25, deterministic=False)
    x = jnp.ones((100, 100))
    y = layer.apply({}, x, rngs={"dropout": jax.random.key(0)})
    # Ten thousand draws: five standard deviations are 0.022.
    assert abs(float((y == 0).mean()) - 0.25) < 0.022
    assert jnp.allclose(y[y != 0], 1 / 0.75)
    with pytest.raises(flax_nn.module.errors.InvalidRngError):
        layer.apply({}, x)


def test_attention_dropout_differs_by_key():
    layer = lean_nn.MultiHeadDotProductAttention(
        2, dropout_rate=0.5, deterministic=False
    )
    x = jax.random.normal(jax.random.key(1), (2, 6, 8))
    variables = drawn(layer, x)
    dropped = jax.jit(lambda key: layer.apply(variables, x, rngs={"dropout": key}))
    a, b, c = (dropped(jax.random.key(k)) for k in (1, 2, 1))
    assert not jnp.allclose(a, b)
    assert jnp.array_equal(a, c)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_save_is_keyword_only_and_checked(name):
    layer = getattr(lean_nn, name)
    assert layer().save == "input"
    assert layer(save="output").save == "output"
    with pytest.raises(ValueError, match="save='both'"):
        layer(save="both")


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm"])
def test_norm_masks(name):
    options = dict(num_groups=4) if name == "GroupNorm" else {}
    options |= dict(use_running_average=False) if name == "BatchNorm" else {}
    plain, lean = pair(name, options)
    x = jax.random.normal(jax.random.key(1), (2, 6, 8))
    mask = jax.random.bernoulli(jax.random.key(2), 0.8, x.shape)
    variables = drawn(plain, x)
    want = run(plain, variables, x, mask=mask)
    assert_close(want, run(lean, variables, x, mask=mask))


@pytest.mark.parametrize(
    "name, options, call",
    [
        ("LayerNorm", dict(force_float32_reductions=False), {}),
        (
            "BatchNorm",
            dict(use_running_average=False, force_float32_reductions=False),
            {},
        ),
        ("Dense", dict(features=3, dot_general=jax.lax.dot_general), {}),
        (
            "Conv",
            dict(features=3, kernel_size=3, conv_general_dilated=conv_general_dilated),
            {},
        ),
        ("MultiHeadAttention", dict(num_heads=2, precision="highest"), {}),
    ],
)
def test_unserved_options_run_flax_and_say_so_once(name, options, call, monkeypatch):
    monkeypatch.setattr("jaxmem.nn._fallback._said", set())
    plain, lean = pair(name, options)
    x = jax.random.normal(jax.random.key(1), (2, 6, 8))
    variables = drawn(plain, x)
    want = run(plain, variables, x, **call)
    with pytest.warns(UserWarning, match="Flax's own code runs"):
        assert_close(want, run(lean, variables, x, **call))
    assert_close(want, run(lean, variables, x, **call))  # silent: warnings are errors


def test_decode_keeps_flax_cache(monkeypatch):
    monkeypatch.setattr("jaxmem.nn._fallback._said", set())
    plain, lean = pair("MultiHeadDotProductAttention", dict(num_heads=2, decode=True))
    x = jax.random.normal(jax.random.key(1), (2, 6, 8))
    variables = initialized(plain, x)
    with pytest.warns(UserWarning, match="decode"):
        assert_trees_identical(variables, initialized(lean, x))
    want = plain.apply(variables, x[:, :1], mutable=["cache"])
    assert_close(want, lean.apply(variables, x[:, :1], mutable=["cache"]))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm"])
def test_norms_keep_no_float32_copies(name):
    plain, lean = pair(name, dict(dtype=jnp.bfloat16))
    if name == "BatchNorm":
        plain, lean = (m.clone(use_running_average=False) for m in (plain, lean))
    x = jnp.ones((2, 64, 256), jnp.bfloat16)
    variables = drawn(lean, x)

    def kept(layer):
        return kept_bytes(lambda v, x: run(layer, v, x)[0], variables, x)

    # A few float32 a row, group or feature; plain keeps several float32 inputs.
    assert kept(lean) < x.nbytes / 8
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms cannot do without
        assert kept(plain) > x.nbytes


def test_dense_keeps_no_cast_copies():
    plain, lean = pair("Dense", dict(features=256, dtype=jnp.bfloat16))
    x = jnp.ones((64, 128), jnp.bfloat16)
    variables = drawn(plain, x)
    assert kept_bytes(plain.apply, variables, x) >= 128 * 256 * 2
    assert kept_bytes(lean.apply, variables, x) == 0


def test_conv_keeps_no_cast_copies():
    plain, lean = pair("Conv", dict(features=8, kernel_size=(3,), dtype=jnp.bfloat16))
    x = jnp.ones((4, 6, 128), jnp.bfloat16)
    variables = drawn(plain, x)
    assert kept_bytes(plain.apply, variables, x) >= 3 * 128 * 8 * 2
    assert kept_bytes(lean.apply, variables, x) == 0
