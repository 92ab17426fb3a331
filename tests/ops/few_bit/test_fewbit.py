"""Ops with a derivative from a code: which derivative, what is kept, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import ops
from jaxmem.ops import fewbit, fewbit_table
from jaxmem.ops.activations.relu_sums import GELU_SUM, SILU_SUM
from jaxmem.ops.codes.packing import packed_codes_nbytes
from jaxmem.ops.few_bit.tables import FUNCTIONS, shipped
from tests.arrays import array

NAMES = {n: n for n in FUNCTIONS if not n.startswith("gelu")} | {"gelu": "gelu_tanh"}
TWO_VALUED = ("relu", "leaky_relu")
SHAPE = (3, 5, 13)


def _x(dtype=jnp.float32, shape=SHAPE):
    return array(3 * np.random.default_rng(0).standard_normal(shape), dtype)


def _levels(table, x):
    """The table's derivative, compared in float32 as the op does."""
    borders, levels = (np.asarray(part, np.float32) for part in table[:2])
    return levels[np.searchsorted(borders, np.asarray(x, np.float32), side="right")]


def _pull(op, x):
    @jax.jit
    def both(x):
        y, pull = jax.vjp(op, x)
        return y, pull(jnp.ones_like(y))[0]

    return both(x)


def _bump(x):
    return x * jnp.exp(-x * x)


@pytest.mark.parametrize("bits", [1, 3, 5, 8])
def test_the_derivative_is_the_table_and_the_code_is_all_that_is_kept(bits):
    rng = np.random.default_rng(bits)
    borders = np.sort(rng.uniform(-4, 4, 2**bits - 1))
    table = borders, rng.standard_normal(2**bits)
    op = fewbit(_bump, table=table)
    x = _x().at[0, 0, : min(13, len(borders))].set(borders[:13])
    y, got = _pull(op, x)
    np.testing.assert_array_equal(got, _levels(table, x))
    np.testing.assert_array_equal(y, jax.jit(_bump)(x))
    kept = [e for e in jaxmem.residuals(op, x) if e.kind == "intermediate"]
    assert sum(e.bytes for e in kept) == packed_codes_nbytes(SHAPE, bits)


def test_levels_that_come_back_share_a_code():
    x = _x()
    op = fewbit(jax.nn.relu6, 1)
    assert jaxmem.residuals(op, x).total_bytes == packed_codes_nbytes(SHAPE, 1)
    y, slope = _pull(op, x)
    np.testing.assert_array_equal(y, jax.nn.relu6(x))
    np.testing.assert_array_equal(slope, _pull(jax.nn.relu6, x)[1])
    borders = np.linspace(-4, 4, 20)  # more than are written out
    table = borders, np.arange(21) % 3
    op = fewbit(_bump, table=table)
    np.testing.assert_array_equal(_pull(op, x)[1], _levels(table, x))
    assert jaxmem.residuals(op, x).total_bytes == packed_codes_nbytes(SHAPE, 2)


def test_an_op_from_the_solver_is_that_of_its_table():
    where = {"interval": (-4.0, 4.0), "weight": "normal"}
    op, table = fewbit(_bump, 2, **where), fewbit_table(_bump, 2, **where)
    np.testing.assert_array_equal(_pull(op, _x())[1], _levels(table, _x()))


@pytest.mark.fast("silu", "squared_relu", "tanh", "gelu")
@pytest.mark.parametrize("name", NAMES)
def test_activations_take_bits(name):
    op, table = getattr(ops, name), shipped(NAMES[name], 2)
    for dtype in (jnp.float32, jnp.bfloat16):
        x = _x(dtype)
        y, got = _pull(lambda x: op(x, save=2), x)
        assert got.dtype == y.dtype == dtype
        np.testing.assert_array_equal(got, _levels(table, x).astype(dtype))
        # both are the float32 value, rounded once
        want = jax.jit(lambda x: op(x, save="input"))(x)
        np.testing.assert_array_equal(y, want)
        kept = jaxmem.residuals(lambda x: op(x, save=2), x).total_bytes
        assert kept == packed_codes_nbytes(SHAPE, 2)


@pytest.mark.fast("silu", "gelu", "relu", "leaky_relu")
@pytest.mark.parametrize("name", [*NAMES, *TWO_VALUED])
def test_exact_words_agree(name):
    op, x = getattr(ops, name), _x()
    words = ["input"]
    words += [] if name == "mish" else ["output"]
    words += ["bit", 1, 5] if name in TWO_VALUED else []
    results = [_pull(lambda x, w=w: op(x, save=w), x) for w in words]
    for y, slope in results[1:]:
        # GELU and SiLU recover the derivative from their output to 1e-4
        np.testing.assert_allclose(y, results[0][0], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(slope, results[0][1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TWO_VALUED)
def test_a_bit_is_exact_for_two_slopes(name):
    op = getattr(ops, name)
    x = jnp.asarray([-np.inf, -2.0, -0.0, 0.0, 1e-30, 2.0, np.inf], jnp.float32)
    slopes = lambda fn: jax.jit(jax.vmap(jax.grad(fn)))(x)
    slope = slopes(lambda x: op(x, save="bit"))
    np.testing.assert_array_equal(slope, slopes(getattr(jax.nn, name)))
    kept = jaxmem.residuals(lambda x: op(x, save="bit"), _x()).total_bytes
    assert kept == packed_codes_nbytes(SHAPE, 1)


def test_elu_of_another_alpha():
    x = jnp.asarray([-3.0, -1e-3, 1e-3, 3.0])
    slope = _pull(lambda x: ops.elu(x, 2.0, save=3), x)[1]
    want = jax.vmap(jax.grad(lambda x: jax.nn.elu(x, 2.0)))(x)
    np.testing.assert_allclose(slope, want, atol=0.3)  # half of the widest step
    np.testing.assert_array_equal(slope[2:], slope[3])  # a border lies at the jump


@pytest.mark.parametrize(
    "op, plain, sum_of_relus",
    [
        (ops.regelu2, FUNCTIONS["gelu_erf"], GELU_SUM),
        (ops.resilu2, FUNCTIONS["silu"], SILU_SUM),
    ],
)
def test_approx_bp(op, plain, sum_of_relus):
    x = 2 * _x(shape=(400,))
    y, slope = _pull(op, x)
    rises, corners = np.array(sum_of_relus)
    want = np.sum(rises * (np.asarray(x)[:, None] >= corners), axis=1)
    np.testing.assert_allclose(slope, want, atol=1e-7)
    assert len(np.unique(slope)) == 4
    np.testing.assert_allclose(y, plain(x), rtol=1e-6, atol=1e-6)


def test_float16_overflow_makes_no_nan():
    x = jnp.asarray([-np.inf, -65504, -300, 300, 65504, np.inf], jnp.float16)
    for op in (
        lambda x: ops.gelu(x, save=3),
        ops.regelu2,
        lambda x: ops.tanh(x, save=4),
    ):
        y, slope = _pull(op, x)
        assert y.dtype == slope.dtype == jnp.float16
        assert np.all(np.isfinite(slope))
        assert np.all(np.isfinite(y[1:-1]))
    assert not np.any(np.isnan(_pull(lambda x: ops.squared_relu(x, save=2), x)[1]))


def test_tables_are_solved_inside_any_trace():
    """More than four bits are not shipped; a trace must not reach the solver."""

    @jax.jit
    def step(x):
        body = lambda c, x: (c, jax.grad(lambda x: ops.softplus(x, save=5))(x))
        return jax.lax.scan(body, 0.0, x)[1]

    x = _x(shape=(20,))
    np.testing.assert_array_equal(step(x), _levels(shipped("softplus", 5), x))


def test_forward_mode_and_second_derivative():
    op = lambda x: ops.gelu(x, save=2)
    x = _x(shape=(9,))
    tangent = jax.jit(lambda x: jax.jvp(op, (x,), (jnp.ones_like(x),))[1])(x)
    np.testing.assert_array_equal(tangent, _pull(op, x)[1])
    assert jax.jit(jax.grad(jax.grad(op)))(1.0) == 0  # of steps


def test_frozen_input_keeps_nothing():
    w = jnp.ones((4, 4))
    fn = lambda x, w: jnp.sum(ops.gelu(x @ jnp.ones((4, 4)), save=2)) + jnp.sum(w)
    assert jaxmem.residuals(fn, jnp.ones((4, 4)), w, argnums=1).total_bytes == 0


def test_scalars_integers_and_float64():
    assert ops.gelu(3, save=2).dtype == fewbit(jnp.sin, 2)(3).dtype == jnp.float32
    with jax.enable_x64(True):
        x = jnp.linspace(-3, 3, 11, dtype=jnp.float64)
        y, slope = _pull(lambda x: ops.gelu(x, save=3), x)
        assert y.dtype == slope.dtype == jnp.float64
        # x / 2 times 1 + tanh, which is rounded in units of one
        np.testing.assert_allclose(y, jax.nn.gelu(x), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("save", [0, 9, -1, True, False, "x", 2.0, None], ids=repr)
@pytest.mark.parametrize("op", [ops.gelu, ops.relu, ops.mish])
def test_bad_save(op, save):
    with pytest.raises((ValueError, TypeError)):
        op(jnp.ones(3), save=save)


def test_bad_input():
    one = jnp.ones(3)
    with pytest.raises(ValueError, match='gelu_tanh: bits=3 goes with save="auto"'):
        ops.gelu(one, bits=3)
    with pytest.raises(ValueError, match="bits=9: an int, at least 1 and at most 8"):
        ops.gelu(one, save="auto", bits=9)
    with pytest.raises(TypeError, match="save=True: "):
        ops.gelu(one, save=True)
    with pytest.raises(ValueError, match='mish: save=.output.: "input", "auto" or'):
        ops.mish(one, save="output")
    with pytest.raises(ValueError, match="alpha is no positive number"):
        ops.elu(one, jnp.float32(1.0), save=2)
    with pytest.raises(ValueError, match="give bits=1 ... 8, or a table"):
        fewbit(jnp.sin)
    with pytest.raises(ValueError, match="one level more than borders"):
        fewbit(jnp.sin, table=([0.0], [1.0]))
    with pytest.raises(ValueError, match="at most 2 different levels"):
        fewbit(jnp.sin, 1, table=([0.0, 1.0], [1.0, 2.0, 3.0]))
    with pytest.raises(ValueError, match="borders that increase"):
        fewbit(jnp.sin, table=([1.0, 0.0], [1.0, 2.0, 3.0]))
    with pytest.raises(TypeError, match="fewbit: x=complex64.* real"):
        fewbit(jnp.sin, 1)(jnp.ones(3, jnp.complex64))
