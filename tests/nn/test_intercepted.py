"""Layers whose product another library has replaced, as qwix does: they keep it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.nn._intercepted import INTERCEPTED, products_are_intercepted


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.gelu(nn.Dense(8)(x)))


def test_the_other_library_sees_the_product(monkeypatch):
    """Its product is asked for in the layer, with the parameter itself."""
    x = jnp.ones((2, 4))
    params = Model().init(jax.random.key(0), x)
    product, seen = jax.lax.dot_general, []

    def doubled(lhs, rhs, *args, **kwargs):
        seen.append(rhs.shape)
        return 2 * product(lhs, rhs, *args, **kwargs)

    lean = jaxmem.substitute(Model())
    monkeypatch.setattr(jax.lax, "dot_general", doubled)
    want = Model().apply(params, x)
    seen.clear()
    np.testing.assert_allclose(lean.apply(params, x), want, rtol=1e-6)
    assert seen == [(4, 8), (8, 3)]
    assert INTERCEPTED in str(jaxmem.nn.report(lean, x))


def test_another_body_of_the_function(monkeypatch):
    assert not products_are_intercepted()
    other = (lambda *args, **kwargs: None).__code__
    monkeypatch.setattr(jax.lax.dot_general, "__code__", other)
    assert products_are_intercepted()
    monkeypatch.undo()
    assert not products_are_intercepted()


@pytest.mark.parametrize("name", ["dot_general", "conv_general_dilated"])
def test_another_function_of_the_name(monkeypatch, name):
    monkeypatch.setattr(jax.lax, name, lambda *args, **kwargs: None)
    assert products_are_intercepted()
