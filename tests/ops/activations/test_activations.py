"""What the battery does not reach: dtypes, extremes, bad input, sharing in a scan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import _compat, ops
from tests.arrays import array
from tests.references import nbytes

UNARY = ["elu", "gelu", "leaky_relu", "mish", "relu", "sigmoid", "silu", "softplus"]
AVAILABLE = {t.name for t in jaxmem.targets() if t.available}
EXTREMES = [-3e38, -1e30, -200.0, -1e-30, -0.0, 0.0, 1e-30, 200.0, 1e30, 3e38]


@pytest.mark.parametrize("name", [*UNARY, "tanh", "squared_relu"])
def test_gradients_of_extremes_are_finite(name):
    op = getattr(ops, name)
    with np.errstate(over="ignore"):
        x = jnp.asarray(EXTREMES, jnp.float32)
    keep = slice(None) if name != "squared_relu" else slice(None, -2)  # overflows
    assert np.all(np.isfinite(jax.vmap(jax.grad(op))(x)[keep]))


@pytest.mark.parametrize("name", ["elu", "gelu", "leaky_relu", "relu", "silu"])
def test_float32_forward_is_that_of_jax_bit_for_bit(name):
    x = jnp.asarray(np.linspace(-12, 12, 4001), jnp.float32)
    got = jax.jit(getattr(ops, name))(x)
    np.testing.assert_array_equal(got, jax.jit(getattr(jax.nn, name))(x))


@pytest.mark.parametrize("save", ["input", "output"])
def test_relu_is_never_wider_than_its_input(save):
    """Or XLA gives readers that widen the output a float32 array, and keeps that."""
    x = jnp.ones((4, 8), jnp.bfloat16)

    def pulled(x, t):
        return jax.vjp(functools.partial(ops.relu, save=save), x)[1](t)

    assert "f32" not in str(jax.make_jaxpr(pulled)(x, x))


@pytest.mark.parametrize("name", ["elu", "gelu", "leaky_relu", "relu", "softplus"])
@pytest.mark.parametrize("value", [3, -2, 1.5, np.float32(0.5)], ids=repr)
def test_scalars_and_integers_promote_as_in_jax(name, value):
    got, want = getattr(ops, name)(value), getattr(jax.nn, name)(value)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_float16_and_float64_keep_their_dtype():
    with jax.enable_x64(True):
        for dtype in (jnp.float16, jnp.float64):
            x = jnp.linspace(-3, 3, 11, dtype=dtype)
            for save in ("input", "output"):
                y, pull = jax.vjp(lambda x, save=save: ops.gelu(x, save=save), x)
                assert y.dtype == pull(y)[0].dtype == dtype
            np.testing.assert_allclose(
                y, jax.nn.gelu(x), rtol=8 * float(jnp.finfo(dtype).eps), atol=1e-6
            )


@pytest.mark.parametrize("op", [ops.gelu, ops.silu])
def test_save_of_another_word(op):
    with pytest.raises(ValueError, match="save='x': .* or a number of bits"):
        op(jnp.ones(3), save="x")


@pytest.mark.parametrize("save", [2, 3])
def test_a_factor_scales_the_code_of_silu(save):
    """The derivative of x sigmoid(b x) at x is that of SiLU at b x, level by level."""
    x = jnp.linspace(-8, 8, 1001)
    slope = lambda fn, x: jax.grad(lambda x: jnp.sum(fn(x)))(x)
    got = slope(functools.partial(ops.silu, beta=2.0, save=save), x)
    want = slope(functools.partial(ops.silu, save=save), 2.0 * x)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("beta", [0.0, -1.0, np.inf])
def test_a_factor_of_silu_must_be_positive(beta):
    with pytest.raises(ValueError, match="beta="):
        ops.silu(jnp.ones(3), beta=beta)


def test_a_factor_of_silu_has_no_kernel():
    with pytest.raises(ValueError, match="no kernel for beta"):
        ops.silu(jnp.ones(3), beta=2.0, implementation="pallas", save="output")


def test_bad_arguments():
    with pytest.raises(TypeError):
        ops.gelu([1.0, 2.0])
    with pytest.raises(TypeError, match="silu: x=complex64.* real"):
        ops.silu(jnp.ones(3, jnp.complex64))
    with pytest.raises((ValueError, TypeError)):  # jaxtyping is first in the tests
        ops.swiglu(jnp.ones(3), jnp.ones(4))
    with pytest.raises(ValueError, match="glu: axis=-1 must have an even size"):
        ops.glu(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="glu: axis=2 is none"):
        ops.glu(jnp.ones((2, 4)), axis=2)


@pytest.mark.parametrize("axis", [0, 1, -2])
def test_glu_axis(axis):
    x = array(np.random.default_rng(0).standard_normal((4, 6)), jnp.float32)
    np.testing.assert_allclose(ops.glu(x, axis), jax.nn.glu(x, axis), rtol=1e-6)


def _mlp(op):
    def loss(weights, x):
        def body(x, w):
            return op(x @ w[0]) @ w[1], None

        return jnp.sum(jax.lax.scan(body, x, weights)[0].astype(jnp.float32))

    return loss


@pytest.mark.parametrize(
    "op", [lambda x: ops.gelu(x, save="output"), ops.relu, ops.tanh]
)
def test_scan_keeps_the_output_once(op):
    layers, n, d, f = 3, 16, 4, 32
    weights = (jnp.ones((layers, d, f)), jnp.ones((layers, f, d)))
    kept = _compat.saved_residuals(_mlp(op), weights, jnp.ones((n, d)))
    wide = [aval for aval, _ in kept if aval.shape == (layers, n, f)]
    assert sum(map(nbytes, wide)) == layers * n * f * 4


@pytest.mark.skipif("h100" not in AVAILABLE, reason="targets extra")
@pytest.mark.parametrize("approximate", [True, False])
def test_compiled_geglu_keeps_no_function_of_the_gate(approximate):
    op = functools.partial(ops.geglu, approximate=approximate)

    def step(g, gate, up):
        y, pull = jax.vjp(op, gate, up)
        y, g = jax.lax.optimization_barrier((y, g))  # as in a step of several layers
        return y, pull(g)

    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    report = jaxmem.estimate(jax.jit(step), x, x, x, target="h100")
    assert report.temp_bytes < 1024


def test_swiglu_keeps_the_gate_alone_for_a_frozen_gate():
    gate, up = jnp.ones((4, 8)), jnp.ones((4, 8))
    kept = _compat.saved_residuals(lambda up: ops.swiglu(jnp.sin(gate), up), up)
    assert sum(nbytes(aval) for aval, _ in kept) == nbytes(gate)
