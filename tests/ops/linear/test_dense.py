"""Dense: Flax's shapes and dtypes, no cast copies kept, no matmul repeated."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import ops
from tests.arrays import array
from tests.references import kept_bytes


def _normal(seed, shape, dtype="float32"):
    return array(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16", "int32"])
def test_values_are_those_of_flax(dtype, x_dtype):
    x = (3 * _normal(0, (2, 3, 4))).astype(x_dtype)
    kernel, bias = _normal(1, (4, 5)), _normal(2, 5)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        params = {"params": {"kernel": kernel, "bias": bias}}
        want = nn.Dense(5, dtype=dtype).apply(params, x)
    got = ops.dense(x, kernel, bias, dtype=dtype)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("axis", [(1, 2), (-1, 1), 1])
def test_axes_are_those_of_dense_general(axis):
    x = _normal(0, (3, 4, 5))
    named = (axis,) if isinstance(axis, int) else axis
    kernel = _normal(1, (*(x.shape[a] for a in named), 2, 3))
    got = ops.dense(x, kernel, axis=axis)
    np.testing.assert_allclose(
        got,
        jnp.tensordot(x, kernel, (named, tuple(range(len(named))))),
        rtol=1e-5,
        atol=1e-5,
    )


def test_preferred_element_type():
    x, kernel = _normal(0, (3, 4), "bfloat16"), _normal(1, (4, 2), "bfloat16")
    y = ops.dense(
        x, kernel, _normal(2, 2, "bfloat16"), preferred_element_type="float32"
    )
    assert y.dtype == jnp.float32


@pytest.mark.parametrize(
    "wanted,kept", [({0}, 0), ({1}, 24), ({2}, 0), ({0, 1, 2}, 24)]
)
def test_keeps_a_wide_input_in_the_compute_dtype(wanted, kept):
    args = _normal(0, (3, 4)), _normal(1, (4, 5)), _normal(2, 5)
    fn = lambda x, k, b: ops.dense(x, k, b, dtype="bfloat16")
    assert kept_bytes(fn, args, frozenset(wanted)) == kept


@pytest.mark.parametrize("scanned", [False, True])
def test_repeats_no_matmul(scanned):
    x, kernels = _normal(0, (16, 32), "bfloat16"), _normal(1, (3, 32, 32))

    def dots(dense):
        def loss(kernels, x):
            if scanned:
                body = lambda x, k: (jnp.tanh(dense(x, k)), None)
                return jax.lax.scan(body, x, kernels)[0].astype("f4").sum()
            for k in kernels:
                x = jnp.tanh(dense(x, k))
            return x.astype("f4").sum()

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        text = step.lower(kernels, x).compile().as_text()
        return text.count(" dot(")

    plain = dots(lambda x, k: x @ k.astype(x.dtype))
    assert plain >= 3
    assert dots(lambda x, k: ops.dense(x, k, dtype=x.dtype)) == plain


BAD = [
    (lambda x, k: ops.dense(x, k.T), "must start with"),
    (lambda x, k: ops.dense(x, k, jnp.ones(4)), "bias has shape"),
    (lambda x, k: ops.dense(x, k, axis=2), "out of range"),
    (lambda x, k: ops.dense(x, k, axis=(1, -1)), "twice"),
    (lambda x, k: ops.dense(x, k, dtype="int32"), "floating or complex"),
]


@pytest.mark.parametrize("call,message", BAD, ids=[m for _, m in BAD])
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.ones((3, 4)), jnp.ones((4, 5)))
