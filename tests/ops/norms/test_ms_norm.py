"""MS norms: bytes beside the plain pair, merging and its inverse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import ops
from tests.arrays import array
from tests.references import kept_bytes, nbytes


def _normal(seed, shape):
    return array(np.random.default_rng(seed).standard_normal(shape), "float32")


X, KERNEL, BIAS = _normal(0, (6, 32)), _normal(1, (32, 5)), _normal(2, (5,))
SCALE, SHIFT = 1 + _normal(3, (32,)) / 4, _normal(4, (32,))


def test_one_tensor_where_the_pair_keeps_two():
    def pair(norm):
        def fn(x, scale, shift, kernel):
            return ops.dense(norm(x[::-1], scale, shift), kernel)

        return kept_bytes(fn, (X, SCALE, SHIFT, KERNEL), {0, 1, 2, 3})

    assert pair(ops.ms_layer_norm) == nbytes(X) + 4 * 6
    assert pair(ops.layer_norm) == 2 * nbytes(X) + 8 * 6


def test_rms_norm_and_array():
    got = ops.ms_rms_norm(X, SCALE)
    want = ops.rms_norm(X, SCALE)
    np.testing.assert_allclose(got.array(), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        ops.dense(got, KERNEL, BIAS), ops.dense(want, KERNEL, BIAS), atol=1e-4
    )


def test_a_scale_of_zero_still_learns():
    """Nothing is divided by the scale, so its gradient is exact where it is zero."""
    loss = lambda norm: lambda s: jnp.sin(ops.dense(norm(X, s), KERNEL)).sum()
    zero = SCALE.at[:9].set(0.0)
    got, want = (
        jax.grad(loss(norm))(zero) for norm in (ops.ms_layer_norm, ops.layer_norm)
    )
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_merge_and_its_inverse():
    kernel, bias = ops.merge_scale(KERNEL, BIAS, SCALE, SHIFT)
    want = ops.dense(ops.layer_norm(X, SCALE, SHIFT), KERNEL, BIAS)
    np.testing.assert_allclose(
        ops.dense(ops.layer_norm(X), kernel, bias), want, atol=1e-4
    )
    back = ops.unmerge_scale(kernel, bias, SCALE, SHIFT)
    np.testing.assert_allclose(back[0], KERNEL, rtol=1e-5)
    np.testing.assert_allclose(back[1], BIAS, atol=1e-4)


BAD = [
    (lambda: ops.ms_layer_norm(X, SCALE[:3]), "scale has shape"),
    (lambda: ops.ms_layer_norm(X, save="input"), "keep their output"),
    (lambda: ops.merge_scale(KERNEL, None, SCALE[:3]), "scale has shape"),
    (lambda: ops.unmerge_scale(KERNEL, None, SCALE * 0), "scale=.*without a zero"),
    (lambda: ops.unmerge_scale(KERNEL, None, SCALE, SHIFT), "no bias"),
    (lambda: ops.dense(ops.ms_layer_norm(X), KERNEL.T, axis=0), "must start"),
]


@pytest.mark.parametrize("call, message", BAD, ids=[m for _, m in BAD])
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()
