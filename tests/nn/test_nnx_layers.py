"""Every nnx drop-in against Flax's layer: tree, initial bits, outputs, gradients."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx as flax_nn

from jaxmem.nn import nnx as lean_nn
from tests.nn.compare import assert_close, assert_trees_identical, kept_bytes

LAYERS = [
    ("LayerNorm", (8,), {}),
    ("LayerNorm", (8,), dict(use_bias=False, use_scale=False)),
    ("RMSNorm", (8,), {}),
    ("GroupNorm", (8,), dict(num_groups=2)),
    ("GroupNorm", (8,), dict(num_groups=None, group_size=4)),
    ("BatchNorm", (8,), {}),
    ("BatchNorm", (8,), dict(use_running_average=True)),
    ("Linear", (8, 5), {}),
    ("Linear", (8, 5), dict(use_bias=False, preferred_element_type=jnp.float32)),
    ("LinearGeneral", ((6, 8), (3, 4)), dict(axis=(-2, -1))),
    ("LinearGeneral", (8, 4), {}),
    ("Conv", (8, 4, 3), dict(strides=2)),
    ("Conv", (8, 4, (2, 2)), dict(padding="CIRCULAR", use_bias=False)),
    ("Conv", (8, 4, 3), dict(preferred_element_type=jnp.float32)),
    ("Dropout", (0.5,), dict(deterministic=True)),
    ("MultiHeadAttention", (4, 8), dict(decode=False)),
    ("MultiHeadAttention", (4, 8), dict(decode=False, num_kv_heads=2)),
    ("MultiHeadAttention", (2, 8), dict(decode=False, normalize_qk=True)),
]
IDS = [f"{name}-{'-'.join(options)}" for name, _, options in LAYERS]


def pair(name, args, options):
    return (
        getattr(module, name)(*args, **options, rngs=flax_nn.Rngs(0))
        for module in (flax_nn, lean_nn)
    )


@flax_nn.jit(static_argnames=("is_causal", "decode"))
def run(layer, x, **kwargs):
    return layer(x, **kwargs)


@flax_nn.jit
def gradients(layer, x):
    return flax_nn.grad(lambda m, x: jnp.sum(jnp.sin(m(x))), argnums=(0, 1))(layer, x)


@pytest.mark.parametrize("name, args, options", LAYERS, ids=IDS)
def test_equals_flax(name, args, options):
    plain, lean = pair(name, args, options)
    x = jax.random.normal(jax.random.key(1), (2, 6, 8))
    assert_trees_identical(state(plain), state(lean))
    assert_close(run(plain, x), run(lean, x))
    assert_close(state(plain), state(lean))
    assert_close(*map(pure, (gradients(plain, x), gradients(lean, x))))
    assert isinstance(lean, type(plain))


def state(layer):
    return flax_nn.to_pure_dict(flax_nn.state(layer))


def pure(gradients):
    return flax_nn.to_pure_dict(gradients[0]), gradients[1]


def test_attention_masks_batches_and_cache():
    plain, lean = pair("MultiHeadAttention", (2, 8), dict(decode=False))
    x = jax.random.normal(jax.random.key(1), (2, 3, 5, 8))
    mask = jax.random.bernoulli(jax.random.key(2), 0.7, (2, 3, 1, 5, 5))
    for options in ({"mask": mask}, {"is_causal": True}):
        assert_close(run(plain, x, **options), run(lean, x, **options))
    for layer in (plain, lean):
        layer.init_cache((2, 4, 8))
    for i in range(2):
        token = jax.random.normal(jax.random.key(i), (2, 1, 8))
        assert_close(run(plain, token, decode=True), run(lean, token, decode=True))


def test_dropout_drops_at_its_rate():
    layer = lean_nn.Dropout(0.25, rngs=flax_nn.Rngs(0))
    x = jnp.ones((100, 100))
    y, z = layer(x), layer(x)
    # Ten thousand draws: five standard deviations are 0.022.
    assert abs(float((y == 0).mean()) - 0.25) < 0.022
    assert not jnp.array_equal(y, z)
    assert jnp.array_equal(layer(x, deterministic=True), x)
    key = jax.random.key(3)
    assert jnp.array_equal(layer(x, rngs=key), layer(x, rngs=key))
    with pytest.raises(ValueError, match="rngs"):
        lean_nn.Dropout(0.25)(x)


def test_attention_dropout():
    layer = lean_nn.MultiHeadAttention(
        2, 8, decode=False, dropout_rate=0.5, deterministic=False, rngs=flax_nn.Rngs(0)
    )
    x = jax.random.normal(jax.random.key(1), (2, 6, 8))
    assert not jnp.allclose(layer(x), layer(x))
    still = layer(x, deterministic=True)
    assert jnp.array_equal(still, layer(x, deterministic=True))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_save_is_keyword_only_and_checked(name):
    layer = getattr(lean_nn, name)
    assert layer(8, rngs=flax_nn.Rngs(0)).save == "input"
    assert layer(8, save="output", rngs=flax_nn.Rngs(0)).save == "output"
    with pytest.raises(ValueError, match="save='both'"):
        layer(8, save="both", rngs=flax_nn.Rngs(0))


@pytest.mark.parametrize(
    "name, args, options",
    [
        ("Linear", (8, 5), dict(promote_dtype=lambda arrays, dtype: arrays)),
        ("Conv", (8, 5, 3), dict(promote_dtype=lambda arrays, dtype: arrays)),
        ("MultiHeadAttention", (2, 8), dict(decode=False, precision="highest")),
    ],
)
def test_unserved_options_run_flax_and_say_so_once(name, args, options, monkeypatch):
    monkeypatch.setattr("jaxmem.nn._fallback._said", set())
    plain, lean = pair(name, args, options)
    x = jax.random.normal(jax.random.key(1), (2, 6, 8))
    with pytest.warns(UserWarning, match="Flax's own code runs"):
        assert_close(plain(x), lean(x))
    assert_close(plain(x), lean(x))  # silent: warnings are errors


@pytest.mark.slow
def test_keeps_less_in_bfloat16():
    options = dict(dtype=jnp.bfloat16)
    x = jnp.ones((2, 64, 256), jnp.bfloat16)
    layers = [("LayerNorm", (256,)), ("Linear", (256, 256)), ("Conv", (256, 64, 3))]
    for name, args in layers:
        plain, lean = pair(name, args, options)

        def kept(layer):
            graph, state = flax_nn.split(layer)
            return kept_bytes(lambda s, x: flax_nn.merge(graph, s)(x), state, x)

        assert kept(lean) < x.nbytes / 8
        with jax.numpy_dtype_promotion("standard"):  # Flax's norm cannot do without
            assert kept(plain) > x.nbytes
