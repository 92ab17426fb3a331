"""The solver: optimal, on any weight, what is shipped, and what it refuses."""

import itertools
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.ops import fewbit_table
from jaxmem.ops.activations.relu_sums import GELU_SUM, SILU_SUM
from jaxmem.ops.few_bit.derivative import INTERVAL
from jaxmem.ops.few_bit.steps import best_steps, sample
from jaxmem.ops.few_bit.tables import FUNCTIONS, SHIPPED_BITS, shipped
from jaxmem.ops.few_bit.weight import as_weight
from tests.arrays import array

GELU, GELU_ERF, SILU = (FUNCTIONS[n] for n in ("gelu_tanh", "gelu_erf", "silu"))
X = np.linspace(-10, 10, 200_001)


@pytest.fixture(scope="module")
def slopes():
    """The derivatives on the grid X, in float64."""
    with jax.enable_x64(True):
        return {
            fn: np.asarray(jax.vmap(jax.grad(fn))(X)) for fn in (GELU, GELU_ERF, SILU)
        }


def _steps(borders, levels, x=X):
    return np.asarray(levels)[np.searchsorted(borders, x, side="right")]


def _mean_square(slope, borders, levels):
    return np.mean((slope - _steps(borders, levels)) ** 2) * (X[-1] - X[0])


@pytest.mark.fast("erf", "silu")
@pytest.mark.parametrize("fn", [GELU, GELU_ERF, SILU], ids=["tanh", "erf", "silu"])
def test_reaches_the_thresholds_and_says_its_error(fn, slopes):
    thresholds = (0.0504, 0.01727, 0.00456) if fn is SILU else (0.0416, 0.0119, 0.00315)
    for bits, threshold in zip((2, 3, 4), thresholds, strict=True):
        borders, levels, error = fewbit_table(fn, bits)
        assert borders.shape == (2**bits - 1,) and levels.shape == (2**bits,)
        # 0.0119 is the erf form's: the tanh form's differs in the fifth decimal
        assert (round(error, 4) if fn is GELU else error) <= threshold
        # the grid's sum differs from the integral by a step's width at each border
        want = _mean_square(slopes[fn], borders, levels)
        assert error == pytest.approx(want, abs=1e-5)
        # antisymmetric about 1/2, as the derivative is
        np.testing.assert_allclose(levels + levels[::-1], 1, atol=1e-6)
        np.testing.assert_allclose(borders, -borders[::-1], atol=1e-5)


def test_no_borders_on_a_grid_are_better(slopes):
    """All choices of three among 60 points, each with its best levels."""
    points = np.arange(0, len(X), len(X) // 60)[1:-1]
    sums = [np.append(0, np.cumsum(slopes[GELU] ** p)) for p in (1, 2)]
    chosen = np.array(list(itertools.combinations(points, 3)))
    ends = np.pad(chosen, ((0, 0), (1, 1)), constant_values=((0, 0), (0, len(X))))
    first, second = (np.diff(s[ends]) for s in sums)
    best = np.min(np.sum(second - first**2 / np.diff(ends), axis=1)) * (X[1] - X[0])
    assert fewbit_table(GELU, 2).error <= best + 1e-5


def test_the_normal_weight_of_the_research():
    table = fewbit_table(GELU_ERF, 3, weight="normal")
    np.testing.assert_allclose(table.borders[4:], (0.224, 0.469, 0.78), atol=2e-3)
    assert np.sqrt(table.error) == pytest.approx(0.0437, abs=1e-4)


def test_measured_weights():
    rng = np.random.default_rng(0)
    samples = array(rng.standard_normal((400, 500)), jnp.float32)
    normal = fewbit_table(SILU, 2, weight="normal")
    measured = fewbit_table(SILU, 2, weight=samples)
    # 200,000 samples know the share of a stretch to about 1e-3
    np.testing.assert_allclose(measured.borders, normal.borders, atol=0.02)
    np.testing.assert_allclose(measured.levels, normal.levels, atol=0.01)
    histogram = np.histogram(samples, 512, (-10.0, 10.0))
    refitted = fewbit_table(SILU, 2, weight=histogram)
    np.testing.assert_allclose(refitted.borders, measured.borders, atol=1e-4)
    flat = fewbit_table(SILU, 2, weight=(np.ones(7), np.linspace(-10, 10, 8)))
    even = fewbit_table(SILU, 2)
    np.testing.assert_allclose(flat.borders, even.borders, atol=1e-4)
    assert flat.error == pytest.approx(even.error / 20)  # a density, not 1


def test_stretches_without_weight_have_levels():
    histogram = (np.ones(1), np.array([2.0, 3.0]))
    table = fewbit_table(GELU, 2, weight=histogram)
    assert np.all(np.isfinite(table.levels)) and np.all(np.diff(table.borders) > 0)


def test_an_interval_that_misses_the_data_warns():
    with pytest.warns(UserWarning, match=r"31\.7% of the weight lies outside"):
        fewbit_table(GELU, 2, weight="normal", interval=(-1.0, 1.0))
    with pytest.warns(UserWarning, match="50.0% of the weight"):
        fewbit_table(GELU, 2, weight=np.array([0.0, 1.0, 11.0, -12.0]))
    with pytest.warns(UserWarning, match="50.0% of the weight"):
        fewbit_table(GELU, 2, weight=(np.ones(2), np.array([0.0, 10.0, 20.0])))
    with pytest.raises(ValueError, match="nothing inside"):
        fewbit_table(GELU, 2, weight=np.array([11.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fewbit_table(GELU, 1, weight="normal")


@pytest.mark.fast("gelu_tanh", "sigmoid", "silu")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_shipped_is_what_the_solver_gives(name):
    sampled = sample(FUNCTIONS[name], INTERVAL, as_weight("uniform", INTERVAL))
    for bits in SHIPPED_BITS:
        table = best_steps(sampled, 2**bits)
        borders, levels = shipped(name, bits)
        # the error is flat at the optimum: 1e-15 of it are 1e-7 of a border
        np.testing.assert_allclose(borders, table.borders, atol=2e-6)
        np.testing.assert_allclose(levels, table.levels, atol=2e-6)


@pytest.mark.slow
def test_more_bits_are_solved_when_asked_for():
    borders, levels = shipped("gelu_tanh", 6)
    assert len(levels) == 64 and list(borders) == sorted(borders)
    # sixteen times the stretches of 2 bits: the error falls with their square
    assert fewbit_table(GELU, 6).error < fewbit_table(GELU, 2).error / 16**1.5


@pytest.mark.slow
@pytest.mark.parametrize("objective, power", [("derivative", 2), ("primitive", 4)])
def test_eight_bits(objective, power):
    """The error falls with the square of a stretch, the distance with its fourth."""
    four, eight = (fewbit_table(SILU, b, objective=objective).error for b in (4, 8))
    assert eight < four / 16 ** (0.8 * power)


@pytest.mark.parametrize(
    "fn, sum_of_relus, corner",
    [(GELU_ERF, GELU_SUM, 0.03), (SILU, SILU_SUM, 0.05)],
    ids=["regelu2", "resilu2"],
)
def test_the_primitive_objective_finds_approx_bp(fn, sum_of_relus, corner):
    table = fewbit_table(fn, 2, interval=(-30.0, 30.0), objective="primitive")
    rises, corners = (np.array(part) for part in sum_of_relus)
    # where the published corners lie the distance is flat: they differ by about 0.01
    np.testing.assert_allclose(table.borders, corners, atol=corner)
    np.testing.assert_allclose(table.levels, np.cumsum([0, *rises]), atol=2e-3)
    x = np.linspace(-30, 30, 600_001)
    with jax.enable_x64(True):
        f = np.asarray(fn(jnp.asarray(x)))
    theirs = np.sum(rises * np.maximum(x[:, None] - corners, 0), axis=1)
    theirs = np.mean((f - theirs) ** 2) * 60
    assert table.error <= theirs * (1 + 1e-9)
    rises, corners = np.diff(table.levels), table.borders
    ours = np.sum(rises * np.maximum(x[:, None] - corners, 0), axis=1)
    assert np.mean((f - ours) ** 2) * 60 == pytest.approx(table.error, rel=1e-4)


@pytest.mark.slow
def test_the_primitive_objective_at_other_bits():
    errors = [
        fewbit_table(jnp.tanh, bits, objective="primitive").error for bits in (2, 3)
    ]
    assert errors[0] > 8 * errors[1]
    relu = fewbit_table(GELU, 1, objective="primitive")
    np.testing.assert_allclose((*relu.borders, *relu.levels), (0, 0, 1), atol=1e-9)
    with pytest.raises(ValueError, match="bits=1: the tangents"):
        fewbit_table(jnp.tanh, 1, objective="primitive")


def _kinked(x):
    return jnp.where(x > 1.2345, 2 * x - 1.2345, x)


def _hard_shrink(x):
    return jnp.where(jnp.abs(x) > 0.5, x, 0.0)


def _soft_shrink(x):
    return jnp.sign(x) * jnp.maximum(jnp.abs(x) - 0.5, 0.0)


def _threshold(x):
    return jnp.where(x > 0.1, x, 20.0)


TWO_VALUED = [
    (jax.nn.relu, (0,), (0, 1)),
    (jax.nn.relu6, (0, 6), (0, 1, 0)),
    (jax.nn.hard_tanh, (-1, 1), (0, 1, 0)),
    (jax.nn.hard_sigmoid, (-3, 3), (0, 1 / 6, 0)),
    (_hard_shrink, (-0.5, 0.5), (1, 0, 1)),
    (_soft_shrink, (-0.5, 0.5), (1, 0, 1)),
    (_threshold, (0.1,), (0, 1)),
    (_kinked, (1.2345,), (1, 2)),
]


@pytest.mark.parametrize("fn, borders, levels", TWO_VALUED)
def test_a_derivative_of_two_values_is_one_exact_bit(fn, borders, levels):
    for objective in ("derivative", "primitive"):
        table = fewbit_table(fn, 1, objective=objective)
        assert table.borders.tolist() == [*borders] and table.error == 0
        np.testing.assert_allclose(table.levels, levels, rtol=1e-15)


def _hard_swish_error(borders, levels):
    """The integral of (x / 3 + 1 / 2 inside of +-3, else 0 or 1, less a level)^2."""
    x = np.linspace(-10, 10, 2_000_001)
    slope = np.where(x < -3, 0, np.where(x > 3, 1, x / 3 + 0.5))
    return np.mean((slope - _steps(borders, levels, x)) ** 2) * 20


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_borders_are_the_jumps_where_that_is_best(bits):
    table = fewbit_table(jax.nn.hard_swish, bits)
    assert table.error == pytest.approx(
        _hard_swish_error(table.borders, table.levels), abs=1e-5
    )
    # The straight line of slope 1/3 between the jumps, in equal steps between them.
    inner = 2**bits - 2
    if inner > 1:
        forced = np.linspace(-3, 3, inner + 1)
        means = (forced[1:] + forced[:-1]) / 6 + 0.5
        least = _hard_swish_error(forced, [0, *means, 1])
        assert table.error <= least * (1 + 1e-4)
    if bits > 2:
        assert {-3.0, 3.0} <= {*table.borders.tolist()}
        assert (table.levels[0], table.levels[-1]) == pytest.approx((0, 1), abs=1e-12)


def test_a_jump_beside_curves_is_a_border():
    for fn in (partial(jax.nn.elu, alpha=2.0), jax.nn.selu):
        table = fewbit_table(fn, 3)
        assert table.borders[-1] == 0.0
        assert table.levels[-1] == pytest.approx(float(jax.grad(fn)(1.0)), rel=1e-6)
        told = fewbit_table(fn, 3, breaks=[0])
        np.testing.assert_array_equal(told.borders, table.borders)


BAD = [
    ("bits=0: an int, at least 1 and at most 8", GELU, 0, {}),
    ("bits=9: an int, at least 1 and at most 8", GELU, 9, {}),
    ("bits=True: an int, at least 1 and at most 8", GELU, True, {}),
    ("bits=2.0: an int, at least 1 and at most 8", GELU, 2.0, {}),
    ("relu jumps at 0 as well; name all", jax.nn.relu, 2, {"breaks": (1.0,)}),
    ("relu6 jumps at 6 as well", jax.nn.relu6, 2, {"breaks": (0.0,)}),
    ("inside of the interval that increase", GELU, 2, {"breaks": (1.0, 0.0)}),
    ("inside of the interval that increase", GELU, 2, {"breaks": (11.0,)}),
    ("breaks=3: None, or numbers", GELU, 2, {"breaks": 3}),
    ("64 jumps or more", lambda x: jnp.abs(jnp.sin(20 * x)), 2, {}),
    ("floor is not smooth: it rises by 19", jnp.floor, 2, {}),
    ("log or its derivative is not finite at -9.99", jnp.log, 2, {}),
    ("finite and increasing", GELU, 2, {"interval": (1.0, 1.0)}),
    ("an end=-inf: a number", GELU, 2, {"interval": (-np.inf, 1.0)}),
    ("finite and increasing", GELU, 2, {"interval": 10.0}),
    ("weight='even': \"uniform\"", GELU, 2, {"weight": "even"}),
    ("one edge more than counts", GELU, 2, {"weight": (np.ones(3), np.ones(3))}),
    ("edges of a histogram", GELU, 2, {"weight": (np.ones(1), np.ones(2))}),
    ("counts of a histogram", GELU, 2, {"weight": (np.zeros(1), np.arange(2.0))}),
    ("inputs, finite and not empty", GELU, 2, {"weight": np.array([np.nan])}),
    ("objective='value': one of 'derivative'", GELU, 2, {"objective": "value"}),
]


@pytest.mark.parametrize("message, fn, bits, options", BAD, ids=[b[0] for b in BAD])
def test_bad_input(message, fn, bits, options):
    # the type checker of the tests may be first
    expected = (ValueError, TypeError)
    with pytest.raises(expected) as caught:
        fewbit_table(fn, bits, **options)
    checked = "jaxtyping" in type(caught.value).__module__
    assert checked or message in str(caught.value)


@pytest.mark.parametrize(
    "fn", [lambda x: (x, x), lambda x: x[None], lambda x: x @ x, lambda x: x > 0, 3]
)
def test_no_function_of_a_scalar(fn):
    with pytest.raises(TypeError):
        fewbit_table(fn, 2)
