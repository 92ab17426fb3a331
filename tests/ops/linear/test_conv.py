"""Conv: Flax's values and layouts, no cast copies kept, no convolution repeated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import ops
from tests.arrays import array
from tests.ops.linear.conv_references import lean_conv, plain_conv
from tests.references import kept_bytes


def _normal(seed, shape, dtype="float32"):
    return array(np.random.default_rng(seed).standard_normal(shape), dtype)


X, KERNEL, BIAS = _normal(0, (2, 8, 8, 6)), _normal(1, (3, 3, 6, 4)), _normal(2, 4)


@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16", "int32"])
def test_dtypes_are_those_of_dense(x_dtype):
    x = (3 * X).astype(x_dtype)
    wide = x.astype(jnp.float32)
    got, want = ops.conv(x, KERNEL, BIAS), plain_conv(wide, KERNEL, BIAS)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, want)
    narrow = ops.conv(x, KERNEL, BIAS, dtype="bfloat16")
    assert narrow.dtype == jnp.bfloat16


def test_other_layouts():
    turned = ops.conv(
        X.transpose(0, 3, 1, 2),
        KERNEL.transpose(3, 2, 0, 1),
        BIAS,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )
    np.testing.assert_allclose(
        turned.transpose(0, 2, 3, 1), ops.conv(X, KERNEL, BIAS), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("padding", ["SAME_LOWER", 2, [(1, 0), 1], [0, 3]])
def test_padding_in_every_form(padding):
    got = ops.conv(X, KERNEL, padding=padding, strides=3)
    if not isinstance(padding, str):
        sides = [padding] * 2 if isinstance(padding, int) else padding
        padding = [(p, p) if isinstance(p, int) else p for p in sides]
    want = plain_conv(X, KERNEL, padding=padding, window_strides=(3, 3))
    np.testing.assert_array_equal(got, want)


def test_preferred_element_type():
    x, kernel = X.astype("bfloat16"), KERNEL.astype("bfloat16")
    y = ops.conv(x, kernel, BIAS.astype("bfloat16"), preferred_element_type="float32")
    assert y.dtype == jnp.float32


@pytest.mark.parametrize("wanted", [{0}, {1}, {2}, {0, 1, 2}])
def test_keeps_a_wide_input_in_the_compute_dtype(wanted):
    fn = lambda x, k, b: ops.conv(x, k, b, dtype="bfloat16")
    want = X.nbytes // 2 if 1 in wanted else 0
    assert kept_bytes(fn, (X, KERNEL, BIAS), frozenset(wanted)) == want


def test_repeats_no_convolution():
    x, kernels = X.astype("bfloat16"), _normal(1, (3, 3, 3, 6, 6))

    def convolutions(conv):
        def loss(kernels, x):
            body = lambda x, k: (jnp.tanh(conv(x, k)), None)
            return jax.lax.scan(body, x, kernels)[0].astype("f4").sum()

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        return step.lower(kernels, x).compile().as_text().count(" convolution(")

    plain = convolutions(plain_conv)
    assert plain == 3  # forward, and one for each gradient
    assert convolutions(lean_conv) == plain


BAD = [
    (lambda: ops.conv(X[0, 0], KERNEL[0, 0]), "at least 3"),
    (lambda: ops.conv(X, KERNEL[0]), "one rank"),
    (lambda: ops.conv(X, KERNEL[:, :, :4]), "6 channels"),
    (lambda: ops.conv(X, KERNEL, BIAS[:3]), "bias has shape"),
    (lambda: ops.conv(X, KERNEL, strides=(1, 1, 1)), "strides=\\(1, 1, 1\\)"),
    (lambda: ops.conv(X, KERNEL, strides=0), "strides=0"),
    (lambda: ops.conv(X, KERNEL, padding=(1,)), "padding=\\(1,\\)"),
    (lambda: ops.conv(X, KERNEL, dtype="int32"), "floating or complex"),
]


@pytest.mark.parametrize("call,message", BAD, ids=[m for _, m in BAD])
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()
