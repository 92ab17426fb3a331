"""The derivative recovered from a rounded output and a bit, over the whole range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.ops import gelu, silu
from jaxmem.ops.activations.gelu import ERF, TANH
from jaxmem.ops.activations.inverse import invert, slope_of_rounded
from jaxmem.ops.activations.silu import SILU

OPS = {
    "gelu_tanh": (lambda x: gelu(x, save="output"), TANH),
    "gelu_erf": (lambda x: gelu(x, approximate=False, save="output"), ERF),
    "silu": (lambda x: silu(x, save="output"), SILU),
}
# half a cell of the rounded output at the minimum costs sqrt(2 f'' ulp / 2); float16
# and bfloat16 have the same in their own ulp, found by going through all their numbers
BOUNDS = {"float32": 1e-4, "float16": 0.0075, "bfloat16": 0.016}


def _every_number(dtype):
    numbers = np.arange(2**16, dtype=np.uint16).view(dtype)
    return numbers[np.isfinite(numbers.astype(np.float32))]


def _float32_grid(unimodal):
    near = unimodal.argmin + np.linspace(-0.02, 0.02, 200_001)
    far = np.linspace(-20, 20, 100_001)
    scales = np.logspace(-45, 38, 1000)
    return np.concatenate([near, far, scales, -scales]).astype(np.float32)


def _derivative(op, x):
    return jax.vjp(jax.jit(op), x)[1](jnp.ones_like(x))[0]


@pytest.mark.fast(
    "gelu_erf-bfloat16",
    "gelu_erf-float32",
    "gelu_tanh-float16",
    "gelu_tanh-float32",
    "silu-float32",
)
@pytest.mark.parametrize("dtype", sorted(BOUNDS))
@pytest.mark.parametrize("name", sorted(OPS))
def test_derivative_error(name, dtype):
    op, unimodal = OPS[name]
    dtype = jnp.dtype(dtype)
    x = _float32_grid(unimodal) if dtype == np.float32 else _every_number(dtype)
    got = np.asarray(_derivative(op, jnp.asarray(x)), np.float64)
    with jax.enable_x64(True):
        want = np.asarray(unimodal.slope(jnp.asarray(x.astype(np.float64))))
    # the derivative itself is rounded to dtype: half an ulp of at most 1.13
    rounding = 0.5 * float(jnp.finfo(dtype).eps)
    assert np.max(np.abs(got - want)) <= BOUNDS[dtype.name] + rounding


@pytest.mark.parametrize("name", sorted(OPS))
def test_away_from_the_minimum_float32_has_the_error_of_the_fit(name):
    """2e-6, and as much again for rounding in 40 operations; no more on the whole."""
    op, unimodal = OPS[name]
    x = np.linspace(-6, 6, 200_001).astype(np.float32)
    got = np.asarray(_derivative(op, jnp.asarray(x)), np.float64)
    with jax.enable_x64(True):
        want = np.asarray(unimodal.slope(jnp.asarray(x.astype(np.float64))))
    away = np.abs(x - unimodal.argmin) > 0.1
    error = np.where(away, got - want, 0)
    assert 0 < np.max(np.abs(error)) < 4e-6
    normal = np.exp(-0.5 * np.square(x, dtype=np.float64))
    along = np.sum(normal * error * want) / np.sum(normal * want**2)
    # a factor that a gradient would have: a quarter of what each element is off by
    assert abs(along) < 5e-7


@pytest.mark.parametrize("name", sorted(OPS))
@pytest.mark.parametrize("right", [True, False])
def test_bfloat16_has_the_derivative_of_its_rounded_output(name, right):
    """Of every bfloat16 number that is an output on this side, to 4e-4."""
    _, unimodal = OPS[name]
    y = _every_number(jnp.bfloat16).astype(np.float32)
    y = np.sort(y[(y >= unimodal.low) & (right | (y <= 0))])
    side = np.full(y.shape, right)
    got = np.asarray(jax.jit(slope_of_rounded, static_argnums=0)(unimodal, y, side))
    with jax.enable_x64(True):
        x = invert(unimodal, jnp.asarray(y, jnp.float64), jnp.asarray(side))
        want = np.asarray(unimodal.slope(x))
    error = got - want
    assert 1e-4 < np.max(np.abs(error)) < 4e-4
    # what a gradient would be larger by as a whole, of values between 0 and 4
    near = np.linspace(unimodal.low, 4 if right else 0, 1000)
    error, want = (np.interp(near, y, values) for values in (error, want))
    assert abs(np.sum(error * want) / np.sum(want**2)) < 1e-4


@pytest.mark.parametrize("name", sorted(OPS))
def test_bfloat16_keeps_what_is_no_number(name):
    op, _ = OPS[name]
    x = jnp.asarray([jnp.nan, jnp.inf, -60.0, -1e4], jnp.bfloat16)
    got = np.asarray(_derivative(op, x), np.float32)
    want = np.asarray([np.nan, 1, 0, 0], np.float32)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-20)


@pytest.mark.parametrize("name", sorted(OPS))
def test_float64_reaches_beyond_float32(name):
    op, unimodal = OPS[name]
    with jax.enable_x64(True):
        x = jnp.asarray(np.linspace(-6, 20, 4001))
        error = jnp.abs(_derivative(op, x) - unimodal.slope(x))
        away = jnp.abs(x - unimodal.argmin) > 0.01
        # what y loses to rounding: its ulp times f'' / f', which is 100 at 0.01
        assert float(jnp.max(jnp.where(away, error, 0.0))) < 1e-10
        assert float(jnp.max(error)) < 1e-6


@pytest.mark.parametrize("name", sorted(OPS))
def test_minimum_is_the_root_of_the_derivative(name):
    _, unimodal = OPS[name]
    with jax.enable_x64(True):
        argmin = jnp.asarray(unimodal.argmin, jnp.float64)
        assert abs(float(unimodal.slope(argmin))) < 1e-15
        assert abs(float(unimodal.value(argmin)) - unimodal.low) < 1e-16
        bends = jax.grad(jax.grad(unimodal.value))(argmin)
        assert abs(float(bends) / 2 - unimodal.bottom[0]) < 1e-11


@pytest.mark.parametrize("name", sorted(OPS))
def test_tails_and_outputs_below_the_minimum_are_finite(name):
    _, unimodal = OPS[name]
    below = np.nextafter(np.float32(unimodal.low), np.float32(-1))
    y = jnp.asarray([below, unimodal.low, -1e-30, -1e-45, -0.0], jnp.float32)
    x = invert(unimodal, y, jnp.zeros(y.shape, bool))
    slope = np.asarray(unimodal.slope(x))
    assert np.all(np.isfinite(slope))
    assert np.all(np.abs(slope[2:]) < 1e-8)
    assert np.all(np.abs(slope[:2]) < 1e-4)


@pytest.mark.fast("gelu_tanh", "silu")
@pytest.mark.parametrize("name", sorted(OPS))
def test_second_derivative(name):
    op, unimodal = OPS[name]
    x = jnp.asarray(np.linspace(-5, 5, 40), jnp.float32)
    want = jax.vmap(jax.grad(unimodal.slope))(x)
    forward_over_reverse = jax.vmap(lambda x: jax.jvp(jax.grad(op), (x,), (1.0,))[1])
    # the third derivative, at most 1, times the error of x: that of the derivative,
    # 1e-4, over the second derivative, 0.2 at the minimum. The grid stays 0.015 away
    # from the minima: nearer, 0 / 0 lets the rounding of the derivative through
    for got in (jax.vmap(jax.grad(jax.grad(op)))(x), forward_over_reverse(x)):
        np.testing.assert_allclose(got, want, atol=5e-4)


@pytest.mark.parametrize("name", sorted(OPS))
def test_nan_stays_nan(name):
    op, _ = OPS[name]
    assert np.isnan(jax.grad(op)(jnp.float32(np.nan)))
