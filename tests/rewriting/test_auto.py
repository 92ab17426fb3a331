"""`save="auto"`: the form follows who reads the output, and is said."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxmem
from jaxmem import ops
from jaxmem.rewriting import auto_save, library, rewrite
from tests.arrays import array

W, V, X = jnp.full((8, 32), 0.1), jnp.full((32, 8), 0.1), jnp.ones((16, 8))


def _gelu(x):
    return ops.gelu(x, save="auto", bits=2)


def _choices(fn, args, argnums):
    """What was chosen when these arguments are differentiated, none twice."""
    seen = []
    jaxmem.residuals(auto_save(fn, on_choice=seen.append), *args, argnums=argnums)
    return {choice.keeps for choice in seen}


def _plain(w, v, x):
    return _gelu(x @ w) @ v


def _cast_weight(w, v, x):
    return _gelu(x @ w) @ v.astype(jnp.bfloat16).astype(x.dtype)


def _reshaped(w, v, x):
    y = _gelu(x @ w).reshape(4, 4, 32)
    return jnp.einsum("abf,fd->abd", y, v)


def _nested(w, v, x):
    second = jax.checkpoint(lambda y, v: jax.jit(jnp.matmul)(y, v * 2))
    return jax.jit(lambda x: second(_gelu(x @ w), v))(x)


def _dense(w, v, x):
    return ops.dense(_gelu(x @ w), v)


def _gated(w, v, x):
    return _gelu(x @ w) * (X @ v.T)


def _convolved(w, v, x):
    y = _gelu(x @ w)[None]
    return jax.lax.conv_general_dilated(
        y, v[None], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


def _scanned(w, v, x):
    return jax.lax.scan(
        lambda x, wv: (_plain(*wv, x), None),
        x,
        tuple(jnp.stack([a] * 3) for a in (w, v)),
    )[0]


KEEPING = [
    _plain,
    _cast_weight,
    _reshaped,
    _nested,
    _dense,
    _gated,
    _convolved,
    _scanned,
]


@pytest.mark.parametrize("fn", KEEPING, ids=lambda f: f.__name__)
def test_a_trained_reader_keeps_the_output_and_a_frozen_one_does_not(fn):
    assert _choices(fn, (W, V, X), (0, 1)) == {"output"}
    assert _choices(fn, (W, V, X), (0, 2)) == {"2 bits"}


def _dropped(w, v, x):
    return ops.dropout(_gelu(x @ w), 0.5, jax.random.key(0)) @ v


def _narrowed(w, v, x):
    return _gelu(x @ w).astype(jnp.bfloat16) @ v.astype(jnp.bfloat16)


@pytest.mark.parametrize("fn", [_dropped, _narrowed], ids=lambda f: f.__name__)
def test_another_array_than_the_output_is_what_the_product_keeps(fn):
    assert _choices(fn, (W, V, X), (0, 1)) == {"2 bits"}


def test_products_with_itself_keep_the_output():
    for fn in (lambda x: _gelu(x) ** 2, lambda x: _gelu(x) @ jnp.tanh(_gelu(x)).T):
        assert "output" in _choices(fn, (X,), 0)
    y = lambda x: (lambda y: y * jnp.sin(y))(_gelu(x))
    assert _choices(y, (X,), 0) == {"output"}


def test_two_halves_that_wait_for_each_other():
    fn = lambda w, v, x: _gelu(x @ w) * _gelu(x @ v.T)
    assert _choices(fn, (W, V, X), (0, 1)) == {"output"}


def test_a_stopped_gradient_is_frozen():
    fn = lambda w, v, x: _gelu(x @ w) @ jax.lax.stop_gradient(v)
    assert _choices(fn, (W, V, X), (0, 1)) == {"2 bits"}


def test_bytes_and_gradients_are_those_of_the_form_chosen():
    def fn(save):
        return lambda w, v, x: jnp.sum(ops.gelu(x @ w, save=save) @ v)

    auto = auto_save(lambda w, v, x: jnp.sum(_plain(w, v, x)))
    x = array(np.random.default_rng(0).standard_normal(X.shape), jnp.float32)
    for argnums, form in (((0, 1), "output"), ((0,), 2)):
        kept = [
            jaxmem.residuals(f, W, V, x, argnums=argnums).total_bytes
            for f in (auto, fn(form))
        ]
        assert kept[0] == kept[1]
        got, want = (
            jax.jit(jax.grad(f, argnums=argnums))(W, V, x) for f in (auto, fn(form))
        )
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_without_bits_a_frozen_reader_leaves_the_input():
    fn = lambda w, v, x: ops.silu(x @ w, save="auto") @ v
    assert _choices(fn, (W, V, X), 0) == {"input"}
    assert _choices(fn, (W, V, X), (0, 1)) == {"output"}


def test_nobody_to_resolve_it_keeps_the_input():
    kept = jaxmem.residuals(lambda x: _gelu(jnp.sin(x)), X)
    assert [e.bytes for e in kept if e.operation == "sin"] == [X.nbytes]
    np.testing.assert_allclose(_gelu(X), jax.nn.gelu(X), rtol=1e-6)


@pytest.mark.parametrize("transform", ["grad of jit", "vmap", "hvp", "shard_map"])
def test_under_transforms(transform):
    x = array(np.random.default_rng(0).standard_normal(X.shape), jnp.float32)
    loss = lambda x, f: jnp.sum(f(x @ W) @ V)
    plain = lambda x: loss(x, lambda x: ops.gelu(x, save=2))
    auto = auto_save(lambda x: loss(x, _gelu))
    if transform == "shard_map":
        mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
        spec = PartitionSpec("x")
        sharded = lambda x: jax.shard_map(
            lambda x: _gelu(x @ W) @ V, mesh=mesh, in_specs=spec, out_specs=spec
        )(x)
        auto = auto_save(lambda x: jnp.sum(sharded(x)))
    derive = {
        "grad of jit": lambda f: jax.grad(jax.jit(f)),
        "vmap": lambda f: jax.vmap(jax.grad(lambda x: f(x[None])), in_axes=0),
        "hvp": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (x,))[1],
        "shard_map": jax.grad,
    }[transform]
    got, want = (jax.jit(derive(f))(x) for f in (auto, plain))
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_the_log_and_the_choice_say_what_and_why(caplog):
    seen = []
    with caplog.at_level(logging.INFO, "jaxmem"):
        jax.grad(auto_save(lambda w: _plain(w, V, X).sum(), on_choice=seen.append))(W)
    (choice,) = seen
    assert str(choice) in caplog.text
    assert (choice.op, choice.shape) == ("gelu_tanh", (16, 32))
    assert choice.reason == "the next product is frozen"
    assert choice.source


def test_rewrite_resolves_and_replaced_relus_are_resolved():
    fn = lambda w, v, x: _gelu(jax.nn.relu(x @ w) @ v)
    kept = [
        jaxmem.residuals(rewrite(fn), W, V, X, argnums=a).total_bytes
        for a in (0, (0, 1))
    ]
    codes = 16 * 32 // 8, 16 * 8 * 2 // 8  # of relu, of gelu
    assert kept == [sum(codes), 16 * 32 * 4 + codes[1]]


def test_a_lean_pool_keeps_no_output_of_a_relu():
    def fn(x, window=(1, 2, 2, 1)):
        pool = jax.lax.reduce_window
        return pool(jax.nn.relu(x), -jnp.inf, jax.lax.max, window, window, "VALID")

    x = jnp.ones((2, 8, 16, 8))
    kept = [jaxmem.residuals(f, x).total_bytes for f in (auto_save(fn), rewrite(fn))]
    bits = x.size + x.size // 4 * 2  # a bit of each input, two of each output
    assert kept[0] >= x.nbytes and kept[1] == bits // 8


def test_the_library_can_leave_gelu_to_it():
    fn = rewrite(lambda w, v, x: jax.nn.gelu(x @ w) @ v, library(save="auto"))
    outputs = [
        [e.operation for e in jaxmem.residuals(fn, W, V, X, argnums=a)]
        for a in ((0, 1), (0,))
    ]
    name = "name 'jaxmem_gelu_output'"
    assert name in outputs[0] and name not in outputs[1]


def test_leaves_and_names_of_the_function_stay():
    fn = auto_save(lambda tree, flag: {"y": _gelu(tree["x"]) if flag else 0})
    assert fn({"x": X}, True)["y"].shape == X.shape
    with pytest.raises(TypeError, match="fn=.*: a function"):
        auto_save(3)


def test_of_a_constant():
    fn = lambda x: ops.gelu(2.0, save="auto") * x + ops.relu(3.0, save="auto") * x
    got = jax.grad(auto_save(fn))(1.0)
    np.testing.assert_allclose(got, jax.nn.gelu(2.0) + 3.0, rtol=1e-6)
