"""Codes of a few bits: their error, their mean over draws, what is kept and shared."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxmem
from jaxmem import ops
from jaxmem._float8 import encoded
from jaxmem.ops.codes.quantization import (
    Quantization,
    dequantize,
    quantize,
    quantized_nbytes,
)
from jaxmem.ops.codes.stored import seed_of, sharing
from tests.arrays import array
from tests.references import kept_bytes, nbytes
from tests.sets import some_fast


def _normal(seed, shape, dtype="float32"):
    return array(np.random.default_rng(seed).standard_normal(shape), dtype)


HOWS = (Quantization(8, 64), Quantization(4, 32), Quantization(3, 50, symmetric=True))


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rng", [None, 0])
def test_a_code_is_within_its_step(how, dtype, rng):
    x = _normal(0, (3, 130), dtype)
    codes = quantize(x, how, seed_of(None if rng is None else jax.random.key(rng)))
    assert sum(map(nbytes, jax.tree.leaves(codes))) == quantized_nbytes(
        x.shape, dtype, how
    )
    wide = np.asarray(x, "f8")
    error = np.abs(np.asarray(dequantize(codes, how, x.shape), "f8") - wide)
    step = np.asarray(codes.step, "f8").max()
    # Half a step to the nearest, a step at random; float32 arithmetic on top.
    assert error.max() <= step * (0.5 if rng is None else 1.0) + 1e-6
    # A step is the range of a block over the levels, up to its rounding to bfloat16.
    span = np.ptp(wide, -1) if not how.symmetric else 2 * np.abs(wide).max(-1)
    assert step <= span.max() / (2**how.bits - 2) * (1 + 2**-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rng", [None, 0])
def test_float8_is_within_a_sixteenth_of_the_value(dtype, rng):
    """Of sizes over eight decades; far below the block's largest it is absolute."""
    how = Quantization(dtype=jnp.float8_e4m3fn, block_size=64)
    sizes = jnp.exp(9 * _normal(1, (3, 130)) - 9).astype(dtype)
    x = _normal(0, (3, 130), dtype) * sizes
    codes = quantize(x, how, seed_of(None if rng is None else jax.random.key(rng)))
    assert codes.packed.dtype == jnp.float8_e4m3fn and codes.low is None
    nbytes_of = sum(map(nbytes, jax.tree.leaves(codes)))
    assert nbytes_of == quantized_nbytes(x.shape, dtype, how)
    wide = np.asarray(x, "f8")
    error = np.abs(np.asarray(dequantize(codes, how, x.shape), "f8") - wide)
    blocks = np.repeat(np.asarray(codes.step, "f8").T, 44, axis=1)[:, :130]
    bound = np.maximum(2.0**-4 * np.abs(wide), 2.0**-10 * blocks)
    # at random a value may go to either side; float32 arithmetic on top
    assert np.all(error <= bound * (1 if rng is None else 2) * (1 + 2.0**-20))
    assert np.all(448 * blocks >= np.abs(wide))


def test_float8_codes_are_those_of_ml_dtypes():
    """To the nearest, ties to even: each code, and what lies in the middle of two."""
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    numbers = np.unique(numbers.astype(np.float32)[np.isfinite(numbers.astype("f4"))])
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, middles, [-448.0], np.nextafter(middles, np.inf)])
    x = x.astype(np.float32)
    got = np.asarray(encoded(jnp.asarray(x))).astype(np.float32)
    want = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(got, want)


def test_float8_rounds_at_random_with_the_right_mean():
    how, x = Quantization(dtype="float8_e4m3fn", block_size=50), _normal(3, (50,))
    draw = lambda key: dequantize(quantize(x, how, seed_of(key)), how, x.shape)
    some = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), 2000))
    off = np.asarray(some.std(0)) / 2000**0.5
    assert np.all(np.abs(np.asarray(some.mean(0) - x)) <= 5 * off + 1e-6)


def test_float8_beside_an_outlier():
    """An integer's step is that of the largest; a sixteenth stays a sixteenth."""
    x = _normal(0, (4, 128)).at[:, 7].set(300.0)
    far = lambda how: np.abs(dequantize(quantize(x, how), how, x.shape) - x)[:, :7]
    integer, floating = far(Quantization(8)), far(Quantization(dtype="float8_e4m3fn"))
    assert floating.mean() < integer.mean() / 8


@pytest.mark.parametrize("save", [jnp.float8_e4m3fn, "float8_e4m3fn"])
def test_float8_of_a_dense_layer(save):
    """Bytes; the input's gradient is exact, the kernel's is that of the codes."""
    x, w, g = _normal(0, (8, 128)), _normal(1, (128, 4)), _normal(2, (8, 4))
    how = Quantization(dtype=save)
    fn = lambda x, w: ops.dense(x, w, save=save)
    wanted = quantized_nbytes(x.shape, x.dtype, how)
    assert kept_bytes(fn, (x, w), (1,)) == wanted == 8 * 132
    assert kept_bytes(fn, (x, w), (0,)) == 0
    out, back = jax.vjp(fn, x, w)
    np.testing.assert_array_equal(out, x @ w)
    dx, dw = back(g)
    coded = dequantize(quantize(x, how), how, x.shape)
    np.testing.assert_allclose(dx, g @ w.T, atol=1e-5)
    np.testing.assert_allclose(dw, coded.T @ g, atol=1e-5)


@pytest.mark.parametrize("how", [jnp.float8_e4m3fn, "float8_e4m3fn"])
def test_float8_of_activations_alone(how):
    """A GELU keeps codes of its input, a byte an element and its blocks' steps."""

    class Gelu(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.gelu(x)

    x = _normal(0, (8, 128))
    lean = jaxmem.substitute(Gelu(), activations=how)
    fn = lambda x: lean.apply({}, x)
    codes = Quantization(dtype=how)
    assert kept_bytes(fn, (x,), (0,)) == quantized_nbytes(x.shape, x.dtype, codes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": jnp.float16}, "dtype=.*float8_e4m3fn or None"),
        ({"dtype": "float8_e5m2"}, "dtype=.*float8_e4m3fn or None"),
        ({"dtype": jnp.float8_e4m3fn, "bits": 4}, "bits=4.*8 with dtype"),
    ],
)
def test_bad_floating_codes(options, message):
    with pytest.raises(ValueError, match=message):
        Quantization(**options)


def test_constant_blocks_and_zero_are_exact():
    x = jnp.concatenate([jnp.full(64, 3.7), jnp.zeros(64)])
    how = Quantization(4, 64)
    np.testing.assert_array_equal(dequantize(quantize(x, how), how, x.shape), x)
    spread = _normal(0, 64).at[5].set(0.0)
    how = Quantization(4, symmetric=True)
    assert dequantize(quantize(spread, how), how, (64,))[5] == 0.0


def test_gradients_of_a_product_are_unbiased():
    """Mean over draws within 5 standard errors; to the nearest it is further off."""
    a, b, g = _normal(0, (8, 40)), _normal(1, (40, 6)), _normal(2, (8, 6))
    draws = 1500

    def gradients(rng):
        product = ops.save_quantized(
            jnp.matmul, bits=2, argnums=(0, 1), block_size=20, rng=rng
        )
        return jax.vjp(product, a, b)[1](g)

    keys = jax.random.split(jax.random.key(0), draws)
    samples = jax.jit(jax.vmap(gradients))(keys)
    nearest, exact = gradients(None), (g @ b.T, a.T @ g)
    for some, one, want in zip(samples, nearest, exact, strict=True):
        error = np.asarray(some.mean(0) - want)
        deviation = np.asarray(some.std(0)) / draws**0.5
        assert np.all(np.abs(error) <= 5 * deviation + 1e-5)
        assert np.abs(error).max() < np.abs(one - want).max() / 4


def test_any_function_is_linearised_at_its_codes():
    x, w = _normal(0, (4, 64)), _normal(1, (64,))
    how = Quantization(8, 16)
    fn = lambda x, w: jnp.sin(x * jnp.broadcast_to(w, x.shape))
    lean = ops.save_quantized(fn, bits=8, block_size=16)
    at = dequantize(quantize(x, how), how, x.shape)
    np.testing.assert_array_equal(lean(x, w), fn(x, w))
    got = jax.grad(lambda *a: lean(*a).sum(), (0, 1))(x, w)
    want = jax.grad(lambda *a: fn(*a).sum(), (0, 1))(at, w)
    for g, e in zip(got, want, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-5)
    closed = lambda w: ops.save_quantized(lambda x: fn(x, w), block_size=16)(x).sum()
    np.testing.assert_allclose(jax.grad(closed)(w), want[1], rtol=1e-5, atol=1e-5)


Q, K, V = (_normal(i, (2, 16, 4, 32), "bfloat16") for i in range(3))
IMAGE, FILTERS = _normal(3, (2, 8, 8, 16)), _normal(4, (3, 3, 16, 8))
SITES = {
    # name: (op given save, arguments, bytes kept, largest relative error in 8 bits)
    "softmax": (ops.softmax, (_normal(5, (4, 64)),), 4 * 64 + 4 * 8, 0.02),
    "rms_norm": (ops.rms_norm, (_normal(6, (4, 64)),), 4 * 64 + 4 * 8 + 16, 0.01),
    "conv": (ops.conv, (IMAGE, FILTERS), 2 * 64 * 16 + 2 * 64 * 8, 0.01),
    "attention": (
        ops.dot_product_attention,
        (Q, K, V),
        # q, k, o: a step a head; v: one for four positions of a head; and row sums
        4 * 4096 + 3 * 128 * 2 + 32 * 2 + 2 * 128 * 4,
        0.05,
    ),
}


@pytest.mark.parametrize("name", SITES)
def test_sites(name):
    op, args, kept, bound = SITES[name]
    order = tuple(range(len(args)))
    lean = lambda *a: op(*a, save=8)
    g = _normal(9, jax.eval_shape(op, *args).shape)
    loss = lambda op: lambda *a: jnp.sum(g * op(*a).astype("f4"))
    got = jax.jit(jax.value_and_grad(loss(lean), order))(*args)
    want = jax.jit(jax.value_and_grad(loss(op), order))(*args)
    assert got[0] == want[0]
    for g, e in zip(got[1], want[1], strict=True):
        off = np.asarray(g, "f8") - np.asarray(e, "f8")
        assert np.linalg.norm(off) < bound * np.linalg.norm(np.asarray(e, "f8"))
    assert kept_bytes(lean, args, frozenset(order)) == kept


def _projections(x, kernels):
    return sum(ops.dense(x, k, save=8).sum() for k in kernels)


def test_one_array_is_stored_once():
    x, kernels = _normal(0, (4, 128)), list(_normal(1, (3, 128, 8)))
    once = quantized_nbytes(x.shape, x.dtype, Quantization())
    alone = lambda ks: _projections(x * 2, ks)
    given = lambda ks: _projections(ops.stored(x * 2), ks)
    assert kept_bytes(alone, (kernels,), {0}) == 3 * once
    assert kept_bytes(given, (kernels,), {0}) == once

    def inside(ks):
        with sharing():
            return _projections(x * 2, ks)

    assert kept_bytes(jax.jit(inside), (kernels,), {0}) == once


@pytest.mark.parametrize("count", some_fast([1, 2, 3], 2))
def test_a_layer_behind_activations_reads_what_the_last_one_gives(count):
    """The codes of an activation stand for its output, and for nothing behind that."""
    x, k = _normal(0, (16, 128)), _normal(1, (128, 8))
    g = _normal(2, (16, 8))
    chain = [ops.silu, ops.gelu, ops.softplus][:count]

    def loss(k, **how):
        h = x * 2
        for op in chain:
            h = op(h, **how)
        return (g * ops.dense(h, k, **how)).sum()

    def coded(k):
        with sharing():
            return loss(k, save=8)

    got, want = (jax.jit(jax.grad(fn))(k) for fn in (coded, loss))
    # 256 steps over a block's range, of numbers that spread over a fifth of it
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


def test_sharing_does_not_leak_out_of_an_inner_trace():
    kernels = _normal(1, (3, 128, 8))

    def loss(x, kernels):
        x = x * 2
        with sharing():
            inner = lambda total, k: (total + ops.dense(x, k, save=8).sum(), None)
            total = jax.lax.scan(inner, 0.0, kernels)[0]
            return total + ops.dense(x, kernels[0], save=8).sum()

    got = jax.jit(jax.grad(loss, 1))(_normal(0, (4, 128)), kernels)
    assert np.isfinite(got).all()


def test_a_frozen_kernel_keeps_nothing_of_the_input():
    x, k = _normal(0, (4, 64)), _normal(1, (64, 8))
    op = ops.save_quantized(jnp.matmul)
    assert kept_bytes(op, (x, k), {0}) == 0


X = jnp.ones((3, 8))
BAD = [
    (lambda: ops.Quantization(9), ValueError, "bits=9"),
    (
        lambda: ops.Quantization(1, symmetric=True),
        ValueError,
        "at least 2 and at most 8",
    ),
    (lambda: ops.Quantization(8, 0), ValueError, "block_size=0"),
    (lambda: ops.dense(X, X.T, save=0), ValueError, "save=0"),
    (lambda: ops.softmax(X, save=True), TypeError, "save=True"),
    (lambda: ops.save_quantized(jnp.sin, argnums=1)(X), ValueError, "argnums=1"),
    (lambda: ops.save_quantized(jnp.argmax)(X), TypeError, "int32"),
    (lambda: ops.save_quantized(jnp.sin)(3), TypeError, "no floating"),
]


@pytest.mark.parametrize("call, error, message", BAD, ids=[m for *_, m in BAD])
def test_bad_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()
