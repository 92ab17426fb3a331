"""Max-pool and where: ties as in JAX, padding, bits, bad input."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import ops
from tests.references import kept_bytes

# Half-integers: many ties.
X = jnp.round(np.random.default_rng(0).standard_normal((2, 9, 11, 4)) * 2) / 2
X = X.astype("float32")
CASES = [
    ((2, 2), (2, 2), "VALID"),
    ((3, 3), (2, 2), "SAME"),
    ((3, 2), (1, 3), ((1, 0), (0, 1))),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ties_are_taken_as_by_jax(case):
    got, want = (
        jax.jit(jax.value_and_grad(lambda x, pool=pool: (pool(x, *case) ** 2).sum()))(X)
        for pool in (ops.max_pool, nn.max_pool)
    )
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


def test_nan_and_infinity_pass_through():
    x = X.at[0, 0, 0, 0].set(jnp.nan).at[0, 4, 4, 1].set(jnp.inf)
    got, want = ops.max_pool(x, (2, 2)), nn.max_pool(x, (2, 2))
    np.testing.assert_array_equal(got, want)


def test_where_keeps_a_bit():
    mask = X > 0
    op = lambda x, y: ops.where(mask, x, y)
    loss = lambda op: lambda x, y: jnp.sum(jnp.sin(op(x, y)))
    got = jax.grad(loss(op), (0, 1))(X, 2 * X)
    want = jax.grad(loss(lambda x, y: jnp.where(mask, x, y)), (0, 1))(X, 2 * X)
    for g, e in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, e)
    wide = jnp.ones((64, 256))
    one = lambda x: ops.where(wide > 0, x, 0.0)
    assert kept_bytes(one, (wide,), {0}) == wide.size // 8


BAD = [
    (lambda: ops.max_pool(X, (17, 17)), ValueError, "1 to 256"),
    (lambda: ops.max_pool(X, (2, 2), (2,)), ValueError, "strides"),
    (lambda: ops.max_pool(X, (2, 2), None, "FULL"), ValueError, "padding='FULL'"),
    (lambda: ops.max_pool(X[0, 0, 0], (2,)), ValueError, "fewer axes"),
    (lambda: ops.max_pool(X > 0, (2, 2)), TypeError, "bool"),
    (lambda: ops.where(X, X, 0.0), TypeError, "condition"),
]


@pytest.mark.parametrize("call, error, message", BAD, ids=[m for *_, m in BAD])
def test_bad_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()
