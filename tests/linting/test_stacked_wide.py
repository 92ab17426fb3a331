"""Scans that stack float32 of which only a narrower copy is used."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxmem

CHECK = "stacked wide"
LAYERS, WIDTH = 4, 32
BITS = jax.ShapeDtypeStruct((2,), jnp.uint32)


class Layer(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(WIDTH, use_bias=False, param_dtype=self.dtype)(x), None


class Net(nn.Module):
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        axes, split = {"params": 0}, {"params": True}
        layers = nn.scan(Layer, axes, split_rngs=split, length=LAYERS)
        return layers(self.dtype)(x, None)[0]


def initialised(model, dtype):
    def init(bits):
        params = model.init(jax.random.wrap_key_data(bits), jnp.zeros((1, WIDTH)))
        return jax.tree.map(lambda x: x.astype(dtype), params)

    return init


def test_parameters_that_are_cast_after_their_initialisation():
    init = initialised(Net(), jnp.bfloat16)
    (found,) = jaxmem.lint(init, BITS).of(CHECK)
    assert found.bytes == 4 * LAYERS * WIDTH**2
    assert "only a copy in bfloat16 is used" in found.what
    assert "param_dtype" in found.remedy
    scheduled = jaxmem.schedule(init, donate_argnums=())
    assert not jaxmem.lint(scheduled, BITS).of(CHECK)


def test_parameters_of_the_dtype_itself():
    for dtype in (jnp.float32, jnp.bfloat16):
        init = initialised(Net(dtype), dtype)
        assert not jaxmem.lint(init, BITS).of(CHECK)


def stacked(use):
    def fn(xs):
        return use(jax.lax.scan(lambda c, x: (c, jnp.tanh(x)), 0.0, xs)[1])

    return jaxmem.lint(fn, jax.ShapeDtypeStruct((8, 128), jnp.float32)).of(CHECK)


def test_a_stack_that_is_read_otherwise_is_no_finding():
    half = lambda ys: ys.astype(jnp.bfloat16)
    assert len(stacked(half)) == 1
    assert not stacked(lambda ys: (half(ys), ys))
    assert not stacked(lambda ys: (half(ys), ys.sum()))
    assert not stacked(lambda ys: ys.astype(jnp.int32))
    assert not stacked(lambda ys: None)


@pytest.mark.slow
def test_bytes_of_an_initialisation_on_a_gpu():
    """Nothing but the weights if it is jitted; both dtypes after a cast in a scan."""
    weights = LAYERS * WIDTH**2
    bytes_of = lambda fn: jaxmem.estimate(fn, BITS, target="h100").peak_bytes
    least = 16 * 1024  # beside keys and counters
    assert bytes_of(initialised(Net(), jnp.float32)) < 4 * weights + least
    assert bytes_of(initialised(Net(), jnp.bfloat16)) > 6 * weights
    narrow = Net(jnp.bfloat16)
    assert bytes_of(initialised(narrow, jnp.bfloat16)) < 2 * weights + least
