"""Dropout, sum and norm in one op: its reference, what it keeps, what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import ops
from tests import references
from tests.arrays import array
from tests.ops.norms import normalization_references as plain
from tests.references import Comparison

KEY = jax.random.key(3)
RATE = 0.25


def _dropped(x):
    """Dropout by hand: the op's mask, and a division."""
    keep = ops.dropout(jnp.ones(x.shape, jnp.float32), RATE, KEY) > 0
    scaled = plain._wide(x) / (1 - RATE)
    return jnp.where(keep, scaled, 0.0).astype(x.dtype)


def _plain(norm):
    def fn(x, residual, *parameters):
        total = residual + _dropped(x)
        return norm(total, *parameters), total

    return fn


def _args(count):
    def args(shape, dtype, rng):
        x, *parameters = plain.norm_args(count)(shape, dtype, rng)
        return (x, *references.unary_args(shape, dtype, rng), *parameters)

    return args


def _saves(row_bytes):
    """The sum, so many bytes a row and the seed; the seed only where x is trained."""

    def saves(args, wanted):
        x = args[0]
        if wanted == frozenset({3}):
            return 0
        return (
            references.nbytes(x)
            + row_bytes * (x.size // x.shape[-1])
            + 8 * (0 in wanted)
        )

    return saves


def _op(op, **options):
    return functools.partial(op, rate=RATE, rng=KEY, **options)


COMPARISONS = [
    Comparison(
        "dropout_add_layer_norm",
        _op(ops.dropout_add_layer_norm),
        _plain(plain.plain_layer_norm),
        _args(2),
        ((3, 5, 13),),
        (0, 1, 2, 3),
        _saves(8),
    ),
    Comparison(
        "dropout_add_rms_norm",
        _op(ops.dropout_add_rms_norm),
        _plain(plain.plain_rms_norm),
        _args(1),
        ((3, 5, 13),),
        (0, 1, 2),
        _saves(4),
    ),
]
CASES = [(t, s, d) for t in COMPARISONS for s in t.shapes for d in t.dtypes]


@pytest.mark.fast("dropout_add_layer_norm-float32", "dropout_add_rms_norm-bfloat16")
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[2]}")
def test_equals_plain_reference(case):
    references.check_equal(*case, transform="jit")


@pytest.mark.parametrize("transform", ["vmap", "remat", "shard_map"])
def test_under_transform(transform):
    references.check_equal(COMPARISONS[0], (3, 5, 13), "float32", transform)


@pytest.mark.fast("dropout_add_layer_norm-bfloat16", "dropout_add_rms_norm-float32")
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[2]}")
def test_keeps_what_it_says(case):
    reference, shape, dtype = case
    for wanted in references.subsets(reference.diff):
        references.check_saves(reference, shape, dtype, wanted)


X = array(np.random.default_rng(0).standard_normal((4, 24)), jnp.float32)
R = array(np.random.default_rng(1).standard_normal((4, 24)), jnp.float32)


@pytest.mark.parametrize("save", ["input", "output"])
def test_is_the_composition(save):
    norm = functools.partial(ops.dropout_add_layer_norm, rate=RATE, save=save)
    y, total = jax.jit(lambda x, r: norm(x, r, rng=KEY))(X, R)
    want = R + ops.dropout(X, RATE, KEY)
    np.testing.assert_array_equal(total, want)
    np.testing.assert_array_equal(
        y, jax.jit(lambda x: ops.layer_norm(x, save=save))(want)
    )


def test_the_stream_has_its_own_dtype():
    x = X.astype(jnp.bfloat16)
    y, total = ops.dropout_add_rms_norm(x, R, rate=RATE, rng=KEY)
    assert (y.dtype, total.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(total, R + ops.dropout(x, RATE, KEY).astype("f4"))
    y, total = ops.dropout_add_rms_norm(x, x, dtype=jnp.float32)
    assert (y.dtype, total.dtype) == (jnp.float32, jnp.bfloat16)


def test_without_dropout():
    want = X + R
    for options in ({}, {"rate": 0.5, "deterministic": True}):
        np.testing.assert_array_equal(
            ops.dropout_add_layer_norm(X, R, **options)[1], want
        )
    np.testing.assert_array_equal(ops.dropout_add_layer_norm(X, R, rate=1.0)[1], R)


BAD = [
    (lambda: ops.dropout_add_rms_norm(X, R[:2]), "must have the same"),
    (lambda: ops.dropout_add_rms_norm(X[0, 0], R[0, 0]), "one axis"),
    (lambda: ops.dropout_add_rms_norm(X, R, X[0, :3]), "scale has shape"),
    (lambda: ops.dropout_add_layer_norm(X, R, rate=0.1), "pass rng="),
    (lambda: ops.dropout_add_layer_norm(X, R, rate=2.0), "at least 0 and at most 1"),
    (lambda: ops.dropout_add_layer_norm(X, R, save="sum"), "save='sum'"),
]


@pytest.mark.parametrize("call, message", BAD, ids=[m for _, m in BAD])
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()
