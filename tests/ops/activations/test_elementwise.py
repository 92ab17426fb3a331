"""Chains of elementwise steps: one derivative kept, and what is no such chain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import ops
from tests.arrays import array
from tests.references import kept_bytes

X = array(np.random.default_rng(0).standard_normal((4, 64)), jnp.float32)


def _chain(x):
    return jnp.tanh(x) * jnp.exp(-x * x) * jax.nn.gelu(x)


@pytest.mark.fast("4")
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_of_the_derivative(bits):
    op = ops.elementwise(_chain, save=bits)
    np.testing.assert_array_equal(op(X), _chain(X))
    got, want = (jax.grad(lambda x, f=f: f(x).sum())(X) for f in (op, _chain))
    # Half a step: the spread of a row over the levels.
    allowed = np.ptp(want, -1, keepdims=True) / (2**bits - 1) / 2
    assert np.all(np.abs(got - want) <= allowed * 1.001 + 1e-6)
    assert kept_bytes(op, (X,), {0}) == X.size * bits // 8 + 4 * 8


def test_closed_over_scalars_and_second_derivatives():
    def value(f, s):
        return f(lambda x: jnp.sin(s * x))(X).sum()

    for nth in (jax.grad, lambda f: jax.grad(jax.grad(f))):
        got, want = (
            nth(lambda s, f=f: value(f, s))(jnp.float32(0.3))
            for f in (ops.elementwise, lambda f: f)
        )
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_forward_mode():
    got = jax.jvp(ops.elementwise(_chain), (X,), (X,))
    want = jax.jvp(_chain, (X,), (X,))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


BAD = [
    (jax.nn.softmax, "reduce_max"),
    (lambda x: jnp.cumsum(x, 0), "cumsum"),
    (lambda x: jnp.tanh(x) + jnp.flip(x), "rev"),
    (lambda x: x.sum(), r"output has shape \(\)"),
    (lambda x: x[:, :2], r"output has shape \(4, 2\)"),
]


@pytest.mark.parametrize("fn, message", BAD, ids=[m for _, m in BAD])
def test_what_is_not_elementwise_is_named(fn, message):
    with pytest.raises(ValueError, match=message):
        ops.elementwise(fn)(X)


def test_bad_arguments():
    with pytest.raises(ValueError, match="one shape is needed"):
        ops.elementwise(lambda x, y: x * y)(X, X[0])
    with pytest.raises(TypeError, match="one floating array"):
        ops.elementwise(lambda x: x > 0)(X)
    with pytest.raises(ValueError, match="save=9"):
        ops.elementwise(_chain, save=9)
