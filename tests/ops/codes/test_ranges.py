"""Codes in running ranges: the averages, what is clipped, the bytes of the groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxmem import ops
from jaxmem.ops import stored_in_ranges
from tests.arrays import array
from tests.nn.compare import kept_bytes

GROUPS, ROWS, WIDTH, FEATURES = 4, 48, 64, 8
SCALES = np.repeat([0.1, 1.0, 3.0, 10.0], WIDTH // GROUPS)


def activations(seed, dtype="float32"):
    """As of a layer after GELU: to one side, with heads of different sizes."""
    x = np.random.default_rng(seed).standard_normal((2, ROWS // 2, WIDTH)) * SCALES
    return array(np.asarray(jax.nn.gelu(jnp.asarray(x))), dtype)


def ends(x):
    parts = np.asarray(x, np.float64).reshape(-1, GROUPS, WIDTH // GROUPS)
    return np.stack([parts.min((0, 2)), parts.max((0, 2))])


UNKNOWN = jnp.zeros((2, GROUPS), jnp.float32)
KERNEL = array(np.random.default_rng(9).standard_normal((WIDTH, FEATURES)), "float32")


@jax.jit
def stepped(x, ranges):
    kept, ranges = stored_in_ranges(x, ranges)
    return kept.codes.recall(x), ranges


@pytest.fixture(scope="module")
def trained():
    """The ranges after ten batches, and those batches."""
    ranges, batches = UNKNOWN, [activations(n) for n in range(10)]
    for x in batches:
        ranges = stepped(x, ranges)[1]
    return ranges, batches


def test_ranges_are_averages_of_the_batches(trained):
    got, batches = trained
    want = ends(batches[0])
    for x in batches[1:]:
        want = 0.9 * want + 0.1 * ends(x)
    # ten sums of two products, each rounded in float32
    np.testing.assert_allclose(got, want, rtol=30 * 6e-8)


def test_a_value_is_off_by_half_a_step_or_its_distance_from_the_range(trained):
    ranges, _ = trained
    x = activations(99)
    got = np.asarray(stepped(x, ranges)[0], np.float64)
    low, high = (np.repeat(r, WIDTH // GROUPS) for r in np.asarray(ranges, np.float64))
    clipped = np.clip(np.asarray(x, np.float64), low, high)
    step = (high - low) / 255
    # a quotient and a product of up to 255 steps, each rounded in float32
    assert np.all(np.abs(got - clipped) <= step * (0.5 + 255 * 4 * 6e-8))
    outside = clipped != np.asarray(x)
    # an averaged end has one or two of a group's 768 values beyond it; not ten
    assert 0 < outside.mean() < 2 * 10 / 768


def test_the_first_batch_has_its_own_ranges():
    x = activations(0)
    got, ranges = stepped(x, UNKNOWN)
    np.testing.assert_array_equal(ranges, ends(x).astype(np.float32))
    step = np.repeat(np.ptp(ends(x), axis=0) / 255, WIDTH // GROUPS)
    # a quotient and a product of up to 255 steps, each rounded in float32
    assert np.all(np.abs(got - x) <= step * (0.5 + 255 * 4 * 6e-8))


def test_a_group_that_was_constant_has_its_own_range(trained):
    ranges = trained[0].at[:, 1].set(0.5)
    x = activations(99)
    got, after = stepped(x, ranges)
    alone = stepped(x, UNKNOWN)
    part = slice(WIDTH // GROUPS, 2 * WIDTH // GROUPS)
    np.testing.assert_array_equal(got[..., part], alone[0][..., part])
    np.testing.assert_array_equal(after[:, 1], alone[1][:, 1])


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_ends_that_are_not_finite_leave_the_average(trained, wrong):
    ranges = trained[0]
    x = activations(99).at[0, 0, 0].set(wrong)
    got, after = stepped(x, ranges)
    # no code waits for the ends of its batch, so no other value is touched
    want = np.asarray(stepped(activations(99), ranges)[0])
    np.testing.assert_array_equal(got[:, 1:], want[:, 1:])
    np.testing.assert_array_equal(got[0, 0, 1:], want[0, 0, 1:])
    np.testing.assert_array_equal(after[:, 0], ranges[:, 0])
    assert np.all(after[:, 1:] != ranges[:, 1:])
    assert not np.any(stepped(x, UNKNOWN)[1][:, 0])


def gradient(kept, dy):
    return jax.grad(lambda k: jnp.vdot(ops.dense(kept, k), dy))(KERNEL)


def test_the_kernels_gradient_is_that_at_the_clipped_values(trained):
    """Against the exact one, and against codes with a batch's own ranges.

    The error is what the values are off, times dy: by Cauchy-Schwarz at most the norm
    of the one times that of the other.
    """
    ranges, _ = trained
    x = activations(99)
    dy = array(np.random.default_rng(3).standard_normal((2, ROWS // 2, 8)), "float32")
    exact = jnp.einsum("bsd,bsf->df", x, dy)
    errors = {}
    for name, known in {"running": ranges, "own": UNKNOWN}.items():
        off = stepped(x, known)[0] - x
        got = gradient(stored_in_ranges(x, known)[0], dy)
        # sums of 48 products, in another order
        rounding = 48 * 6e-8 * jnp.linalg.norm(x) * jnp.linalg.norm(dy)
        want = exact + jnp.einsum("bsd,bsf->df", off, dy)
        np.testing.assert_allclose(got, want, atol=float(rounding))
        errors[name] = float(jnp.linalg.norm(got - exact))
        bound = jnp.linalg.norm(off) * jnp.linalg.norm(dy) + rounding
        assert errors[name] <= float(bound)
    # clipping has cost more than the smaller step has gained
    assert errors["own"] < errors["running"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_are_codes_and_two_numbers_a_group(dtype, bits):
    x, kernel = activations(0, dtype), KERNEL.astype(dtype)
    ranges = jnp.ones((2, GROUPS)).at[0].set(-1)

    def of(kernel, x):
        return ops.dense(stored_in_ranges(x, ranges, bits=bits)[0], kernel)

    assert kept_bytes(of, kernel, x) == x.size * bits // 8 + 2 * 4 * GROUPS
    frozen = kept_bytes(lambda x: of(kernel, x), x)
    assert frozen == 0  # the kernel, a constant here, and nothing of x


def test_the_forward_pass_and_the_inputs_gradient_are_exact(trained):
    x = activations(99)
    of = lambda x, known: ops.dense(stored_in_ranges(x, known)[0], KERNEL)
    for known in (UNKNOWN, trained[0] / 100):  # nearly all is clipped
        np.testing.assert_array_equal(of(x, known), ops.dense(x, KERNEL))
        got, want = (
            jax.grad(lambda x, f=f: jnp.sin(f(x)).sum())(x)
            for f in (lambda x, known=known: of(x, known),
                      lambda x: ops.dense(x, KERNEL))
        )  # fmt: skip
        np.testing.assert_array_equal(got, want)


def test_rounding_at_random_is_right_in_the_mean(trained):
    """Of 400 keys the mean is off by a step's half over twenty, times five for luck."""
    ranges, x = trained[0], activations(99)[:1, :4]
    low, high = (np.repeat(r, WIDTH // GROUPS) for r in np.asarray(ranges))

    def drawn(key):
        return stored_in_ranges(x, ranges, rng=key)[0].codes.recall(x)

    mean = jax.vmap(drawn)(jax.random.split(jax.random.key(0), 400)).mean(0)
    step = (high - low) / 255
    assert np.all(np.abs(mean - np.clip(x, low, high)) <= 5 * step / 2 / 20)


def test_other_functions_read_the_codes(trained):
    x = activations(99)
    kept, _ = stored_in_ranges(x, trained[0])
    product = ops.save_quantized(lambda x, k: jnp.sin(x @ k))
    got = jax.grad(lambda k: product(kept, k).sum())(KERNEL)
    at = stepped(x, trained[0])[0]
    want = jax.grad(lambda k: jnp.sin(at @ k).sum())(KERNEL)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4 * np.abs(want).max())


def test_under_shard_map_each_device_has_its_rows(trained):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    x = activations(99)

    @jax.shard_map(mesh=mesh, in_specs=(P("d"), P()), out_specs=(P("d"), P("d")))
    def run(x, ranges):
        kept, ranges = stored_in_ranges(x, ranges)
        return kept.codes.recall(x), ranges[None]

    for known in (UNKNOWN, trained[0]):
        got, ranges = jax.jit(run)(x, known)
        for n in range(2):
            want, after = stepped(x[n : n + 1], known)
            np.testing.assert_array_equal(got[n : n + 1], want)
            np.testing.assert_allclose(ranges[n], after, rtol=1e-6)


def test_under_vmap_each_has_its_ranges(trained):
    x = jnp.stack([activations(98), activations(99)])
    known = jnp.stack([UNKNOWN, trained[0]])
    got, ranges = jax.vmap(stepped)(x, known)
    for n in range(2):
        want, after = stepped(x[n], known[n])
        np.testing.assert_array_equal(got[n], want)
        np.testing.assert_allclose(ranges[n], after, rtol=1e-6)


def test_an_empty_array_leaves_the_ranges(trained):
    kept, ranges = stored_in_ranges(jnp.zeros((0, WIDTH)), trained[0])
    assert kept.codes is None
    np.testing.assert_array_equal(ranges, trained[0])


X = jnp.ones((3, 6))
BAD = [
    (lambda: stored_in_ranges(X, jnp.zeros((2, 4))), ValueError, "4 groups .* divide"),
    (lambda: stored_in_ranges(X, jnp.zeros(2)), ValueError, r"\(2, groups\)"),
    (lambda: stored_in_ranges(X, jnp.zeros((2, 0))), ValueError, r"\(2, groups\)"),
    (lambda: stored_in_ranges(jnp.ones(()), jnp.zeros((2, 1))), ValueError, "divide"),
    (lambda: stored_in_ranges(ops.stored(X), jnp.zeros((2, 1))), TypeError, "already"),
]


@pytest.mark.parametrize("call, error, message", BAD, ids=[m for *_, m in BAD])
def test_bad_calls(call, error, message, untyped):
    with pytest.raises(error, match=message):
        call()
