"""Softmax and log-softmax: the edges of `jax.nn`'s, and accuracy in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import ops
from tests.arrays import array

NAMES = ("softmax", "log_softmax")


def _pair(name):
    return getattr(ops, name), getattr(jax.nn, name)


def _close(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


def _value_and_gradient(op, x, **kwargs):
    y, pull = jax.vjp(lambda x: op(x, **kwargs), x)
    return y, pull(jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape))[0]


@pytest.mark.fast(
    "0-softmax",
    "axis1-softmax",
    "axis2-softmax",
    "axis2-log_softmax",
    "None-softmax",
)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axis", [0, (0, 2), (-1, 1), None])
def test_axes(name, axis):
    lean, plain = _pair(name)
    x = array(np.random.default_rng(0).standard_normal((3, 4, 5)), "float32")
    got, want = (_value_and_gradient(op, x, axis=axis) for op in (lean, plain))
    jax.tree.map(_close, got, want)


@pytest.mark.parametrize("name", NAMES)
def test_infinite_inputs(name):
    lean, plain = _pair(name)
    inf = jnp.inf
    x = jnp.asarray([[-inf, 0.0, 1.0], [-inf, -inf, -inf], [inf, 0.0, 1.0]])
    _close(lean(x), plain(x))


@pytest.mark.parametrize("name", NAMES)
def test_where(name):
    lean, plain = _pair(name)
    x = array(np.random.default_rng(0).standard_normal((3, 4)), "float32")
    where = jnp.asarray([[True, False, True, True], [True] * 4, [False] * 4])
    _close(lean(x, where=where), plain(x, where=where))
    some = where[:2]
    got, want = (_value_and_gradient(op, x[:2], where=some) for op in (lean, plain))
    jax.tree.map(_close, got, want)


def test_where_is_kept_as_given():
    where = jnp.asarray([True, False, True, True])
    loss = lambda x: ops.log_softmax(x, where=where)
    from tests.references import kept_bytes

    assert kept_bytes(loss, (jnp.ones((64, 4)),), frozenset({0})) <= 64 * 4 * 4 + 4


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_rounded_once(name):
    lean, plain = _pair(name)
    x = array(3 * np.random.default_rng(0).standard_normal((9, 300)), "bfloat16")
    np.testing.assert_array_equal(
        lean(x), plain(x.astype("float32")).astype("bfloat16")
    )


@pytest.mark.parametrize("name", NAMES)
def test_second_derivative(name):
    x = array(np.random.default_rng(0).standard_normal((3, 4)), "float32")

    def penalty(op, x):
        return jnp.sum(jnp.cos(jax.grad(lambda x: jnp.sum(jnp.sin(op(x))))(x)))

    got, want = (jax.grad(lambda x, op=op: penalty(op, x))(x) for op in _pair(name))
    _close(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_bad_calls(name):
    lean, _ = _pair(name)
    with pytest.raises(ValueError, match="out of range"):
        lean(jnp.ones(3), axis=1)
    with pytest.raises(ValueError, match="does not broadcast"):
        lean(jnp.ones(3), where=jnp.ones(2, bool))
