"""The counter-based generator: bit for bit, and statistically."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.ops.randomness.bits import positions, random_bits, seed_words, threshold
from pallas_kernels.hashing import random_mask, rounded_rate
from tests.sets import slow_unless

RATES = (0.001, 0.1, 0.25, 0.5, 0.9)


# -- the formulas of the module docstring, in numpy


def mix_np(x, between=None):
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    if between is not None:
        x = x + between
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def seed_np(words):
    k0, k1 = np.uint32([0x9E3779B9]), np.uint32([0x7F4A7C15])
    for w in np.asarray(words, np.uint32):
        k0 = mix_np(k0 ^ w)
        k1 = mix_np(k1 + k0)
    return np.concatenate([k0, k1])


def bits_np(seed, row, column):
    k0, k1 = seed[:1], seed[1:]
    a = mix_np(mix_np(row ^ k0) + k1)
    b = mix_np(mix_np(row + k1) ^ k0)
    c = mix_np(mix_np(column ^ ~k1) + k0)
    return mix_np(a[:, None] ^ c[None, :], b[:, None])


def bits(key, rows=2048, columns=2048, at=(0, 0)):
    row, column = positions((rows, columns))
    row, column = row + np.uint32(at[0]), column + np.uint32(at[1])
    return np.asarray(random_bits(seed_words(key), row, column))


def mask(key, rate, rows=2048, columns=2048, at=(0, 0)):
    """That of attention, which costs half a multiply an element."""
    row, column = positions((rows, columns))
    row, column = row + np.uint32(at[0]), column + np.uint32(at[1])
    return np.asarray(random_mask(seed_words(key), row, column, rate))


def mask_of_bits(key, rate, rows=2048, columns=2048):
    return bits(key, rows, columns) >= threshold(rate)


def mask_np(seed, row, column, rate):
    k0, k1 = seed[:1], seed[1:]
    factor = mix_np(mix_np(row ^ k0) + k1) | np.uint32(1)
    term = mix_np(mix_np(row + k1) ^ k0)
    word = column // np.uint32(2)
    for k in (k1, k0, k1, k0):
        word = (word ^ k) * (2 * (word ^ k) + np.uint32(1))
        word = word ^ (word << np.uint32(4))
    bits = factor[:, None] * word[None, :] + term[:, None]
    half = np.where(column % 2 == 1, bits >> np.uint32(16), bits) & np.uint32(2**15 - 1)
    return half >= round(rate * 2**15)


both_masks = pytest.mark.parametrize("mask", [mask_of_bits, mask])


@pytest.mark.parametrize("at", [(0, 0), (5, 17), (2**32 - 3, 2**32 - 2)])
def test_a_mask_agrees_with_numpy(at):
    key = jax.random.key(7)
    with np.errstate(over="ignore"):
        row = np.arange(11, dtype=np.uint32) + np.uint32(at[0])
        column = np.arange(13, dtype=np.uint32) + np.uint32(at[1])
        want = mask_np(seed_np(jax.random.key_data(key)), row, column, 0.3)
    np.testing.assert_array_equal(mask(key, 0.3, 11, 13, at), want)


@pytest.mark.parametrize("at", [(0, 0), (5, 17), (2**32 - 3, 2**32 - 2)])
def test_agrees_with_numpy(at):
    key = jax.random.key(7)
    with np.errstate(over="ignore"):
        row = np.arange(11, dtype=np.uint32) + np.uint32(at[0])
        column = np.arange(13, dtype=np.uint32) + np.uint32(at[1])
        want = bits_np(seed_np(jax.random.key_data(key)), row, column)
    np.testing.assert_array_equal(bits(key, 11, 13, at), want)


def test_known_bits():
    """Pinned: other implementations must give these too."""
    got = bits(jax.random.wrap_key_data(jnp.asarray([1, 2], jnp.uint32)), 2, 2)
    with np.errstate(over="ignore"):
        two = np.arange(2, dtype=np.uint32)
        np.testing.assert_array_equal(got, bits_np(seed_np([1, 2]), two, two))
    assert got.tolist() == [[1682391894, 1954840510], [286478150, 4063929367]]


def test_a_block_is_a_slice_of_the_whole():
    key = jax.random.key(3)
    whole = bits(key, 64, 48)
    np.testing.assert_array_equal(whole[17:30, 5:48], bits(key, 13, 43, (17, 5)))


def test_rows_are_the_leading_axes_flattened():
    seed = seed_words(jax.random.key(0))
    a = random_bits(seed, *positions((3, 5, 7)))
    b = random_bits(seed, *positions((15, 7)))
    np.testing.assert_array_equal(np.asarray(a).reshape(15, 7), np.asarray(b))


def test_keys_of_every_kind():
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        typed = jax.random.key(5, impl=impl)
        raw = jax.random.key_data(typed)
        got = seed_words(typed)
        np.testing.assert_array_equal(got, seed_words(raw))
        assert got.shape == (2,) and got.dtype == jnp.uint32


@pytest.mark.parametrize(
    "bad", [jax.random.split(jax.random.key(0)), jnp.float32(1), jnp.arange(2)]
)
def test_not_a_key(bad):
    with pytest.raises(ValueError, match="must be one key"):
        seed_words(bad)


# -- statistics: all on fixed keys, with bounds of five standard deviations, so that
# one of the three hundred or so comparisons fails by chance once in five thousand
# rewrites


@both_masks
@pytest.mark.parametrize("rate", RATES)
def test_keep_rate(mask, rate):
    drop = ~mask(jax.random.key(1), rate)
    n = drop.size
    sigma = np.sqrt(rate * (1 - rate))
    assert abs(drop.mean() - rate) < 5 * sigma / np.sqrt(n)
    for axis in (0, 1):  # each line's rate scatters as a binomial's would
        line = drop.mean(axis=axis)
        scatter = line.var() / (sigma**2 / drop.shape[axis])
        assert abs(scatter - 1) < 5 * np.sqrt(2 / line.size)


@pytest.mark.fast("3.814697265625e-06")
@pytest.mark.parametrize("rate", [2.0**-14, 2.0**-18])
def test_a_tiny_rate_is_applied(rate):
    """Of 2**24 elements 1024, or 64: sixteen bits would round the second one to 0."""
    dropped = (~mask_of_bits(jax.random.key(1), rate, 4096, 4096)).sum()
    want = 2**24 * rate
    assert abs(dropped - want) < 5 * np.sqrt(want)


def test_a_mask_rounds_its_rate():
    """To a multiple of 2**-15, but not to 0 and not to 1."""
    assert rounded_rate(0.0) == 0
    assert rounded_rate(0.5) == 0.5
    assert rounded_rate(0.1) == 3277 / 2**15
    assert rounded_rate(2.0**-18) == 2.0**-15
    assert rounded_rate(1 - 2.0**-18) == 1 - 2.0**-15
    dropped = (~mask(jax.random.key(1), rounded_rate(2.0**-18), 4096, 4096)).sum()
    assert abs(dropped - 2**9) < 5 * np.sqrt(2**9)


@functools.cache
def _drawn(mask, rate):
    """Once for all steps from an element to a neighbour."""
    return mask(jax.random.key(2), rate).astype("f8")


def _correlation(a, b):
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).mean() / np.sqrt(a.var() * b.var()))


STEPS = ((0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (64, 0), (0, 128))
# Every step at one rate, and every rate at one step.
NEIGHBOURS = [
    pytest.param(rate, step, marks=slow_unless(rate == 0.1 or step == STEPS[0]))
    for rate in RATES
    for step in STEPS
]


@both_masks
@pytest.mark.parametrize("rate, step", NEIGHBOURS)
def test_neighbours_are_not_correlated(mask, rate, step):
    keep = _drawn(mask, rate)
    r, c = step
    a, b = keep[r:, c:], keep[: keep.shape[0] - r, : keep.shape[1] - c]
    assert abs(_correlation(a, b)) < 5 / np.sqrt(a.size)


@pytest.mark.fast("0.1-mask_of_bits", "0.1-mask")
@both_masks
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_lines_are_not_correlated(mask, rate):
    """All pairs of rows, and all pairs of columns: the scatter and the largest."""
    keep = mask(jax.random.key(3), rate, 1024, 1024).astype("f8")
    z = (keep - (1 - rate)) / np.sqrt(rate * (1 - rate))
    for x in (z, z.T):
        pairs = (x @ x.T / np.sqrt(x.shape[1]))[np.triu_indices(len(x), 1)]
        # The square of such a sum has a variance of 2 + (kurtosis - 1)**2 / columns.
        assert abs(pairs.var() - 1) < 5 * np.sqrt(2.1 / pairs.size)
        # Of half a million 5 is expected as the largest, and 7 at 0.1. One pair of
        # 2**14 has factors that are small multiples of each other in their low bits.
        related = 0 if mask is mask_of_bits or x is not z else pairs.size / 2**13
        assert (np.abs(pairs) >= 7).sum() <= related


@pytest.mark.fast("0.1-mask_of_bits", "0.1-mask")
@both_masks
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_triples_and_rectangles_are_not_correlated(mask, rate):
    """What a product of a row's word and a column's might have and pairs do not."""
    keep = mask(jax.random.key(5), rate).astype("f8")
    z = (keep - (1 - rate)) / np.sqrt(rate * (1 - rate))
    for x in (z, z.T):
        triples = x[:, :-2] * x[:, 1:-1] * x[:, 2:]
        assert abs(triples.mean()) < 5 * triples.std() / np.sqrt(triples.size)
        for far in (1, 7, 512):
            a, b = x[:-far], x[far:]
            corners = a[:, :-1] * a[:, 1:] * b[:, :-1] * b[:, 1:]
            assert abs(corners.mean()) < 5 * corners.std() / np.sqrt(corners.size)


@both_masks
def test_no_wave_stands_out(mask):
    """The power of each frequency is exponential: of n the largest is log n."""
    keep = mask(jax.random.key(6), 0.1, 1024, 1024).astype("f8")
    z = (keep - 0.9) / np.sqrt(0.09)
    power = np.abs(np.fft.rfft2(z)) ** 2 / z.size
    power[0, 0] = 0
    assert power.max() < np.log(power.size) + 5


def _some_keys():
    raw = [jnp.asarray([0, i], jnp.uint32) for i in range(4)]
    raw += [jnp.asarray([i, 0], jnp.uint32) for i in range(1, 3)]
    split = list(jax.random.split(jax.random.key(0), 4))
    folded = [jax.random.fold_in(jax.random.key(9), i) for i in range(4)]
    return raw + split + folded


@both_masks
def test_keys_are_independent(mask):
    masks = [mask(k, 0.1, 512, 512).astype("f8") for k in _some_keys()]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs(_correlation(a, b)) < 5 / 512


def test_each_bit_is_fair_and_independent_of_the_others():
    planes = (bits(jax.random.key(4), 512, 512).reshape(-1, 1) >> np.arange(32)) & 1
    planes = planes.astype("f8")
    n = len(planes)
    assert np.abs(planes.mean(0) - 0.5).max() < 5 * 0.5 / np.sqrt(n)
    correlation = np.corrcoef(planes.T) - np.eye(32)
    assert np.abs(correlation).max() < 5 / np.sqrt(n)


@pytest.mark.parametrize("byte", range(4))
def test_chi_square_of_each_byte(byte):
    values = (bits(jax.random.key(6)) >> np.uint32(8 * byte)) & np.uint32(255)
    expected = values.size / 256
    chi2 = (
        (np.bincount(values.ravel(), minlength=256) - expected) ** 2
    ).sum() / expected
    assert abs(chi2 - 255) < 5 * np.sqrt(2 * 255)


def test_no_two_rows_share_their_mask_up_to_order():
    """Rows must not be permutations of one another, as one word a row would give."""
    got = np.sort(bits(jax.random.key(8), 512, 64), axis=1)
    common = [len(np.intersect1d(got[i], got[i + 1])) for i in range(511)]
    assert max(common) <= 1


def test_threshold_is_exact():
    assert threshold(0.5) == 2**31
    assert threshold(2.0**-32) == 1
    assert threshold(1 - 2.0**-40) == 2**32 - 1
    assert threshold(0.1) == round(0.1 * 2**32)
