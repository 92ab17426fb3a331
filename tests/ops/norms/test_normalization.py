"""Normalisations: Flax's values, named axes, small scales, second derivatives."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import ops
from jaxmem.ops.norms import from_output
from jaxmem.ops.norms.from_output import keep_output, marked_output
from tests.arrays import array
from tests.ops.norms import normalization_references as plain

D = 1024


def _normal(seed, shape, dtype="float32"):
    return array(np.random.default_rng(seed).standard_normal(shape), dtype)


def _flax(module, x, *parameters, **kwargs):
    """A Flax layer's output for given parameters."""
    names = ("scale", "bias")[: len(parameters)]
    params = {"params": dict(zip(names, parameters, strict=True))}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jax.jit(lambda params, x: module.apply(params, x, **kwargs))(params, x)


FLAX = {
    "layer_norm": (
        nn.LayerNorm(dtype="bfloat16"),
        ops.layer_norm,
    ),
    "layer_norm output": (
        nn.LayerNorm(dtype="bfloat16"),
        functools.partial(ops.layer_norm, save="output"),
    ),
    "layer_norm slow variance": (
        nn.LayerNorm(dtype="bfloat16", use_fast_variance=False),
        functools.partial(ops.layer_norm, use_fast_variance=False),
    ),
    "layer_norm promoted": (
        nn.LayerNorm(),
        functools.partial(ops.layer_norm, dtype="float32"),
    ),
    "layer_norm other features": (
        nn.LayerNorm(dtype="bfloat16", reduction_axes=(1, 2), feature_axes=-1),
        functools.partial(ops.layer_norm, axis=(1, 2), feature_axis=-1),
    ),
    "group_norm": (
        nn.GroupNorm(num_groups=4, dtype="bfloat16"),
        functools.partial(ops.group_norm, num_groups=4),
    ),
    "group_norm axes": (
        nn.GroupNorm(num_groups=4, dtype="bfloat16", reduction_axes=(-1,)),
        functools.partial(ops.group_norm, num_groups=4, reduction_axes=-1),
    ),
}


@pytest.mark.parametrize("name", FLAX)
@pytest.mark.parametrize("masked", [False, True])
def test_values_are_those_of_flax(name, masked):
    layer, lean = FLAX[name]
    x = _normal(0, (3, 5, 12), "bfloat16")
    scale, bias = 1 + _normal(1, 12) / 4, _normal(2, 12)
    mask = _normal(3, (3, 5, 12)) > -1 if masked else None
    got = jax.jit(functools.partial(lean, mask=mask))(x, scale, bias)
    want = _flax(layer, x, scale, bias, mask=mask)
    assert got.dtype == want.dtype
    # Both round one float32 value; float32 differences may cross a rounding boundary.
    np.testing.assert_allclose(
        got.astype("f4"), want.astype("f4"), rtol=2**-7, atol=1e-6
    )
    assert np.mean(np.asarray(got != want)) < 0.02


def test_several_feature_axes():
    x, scale = _normal(0, (3, 4, 5)), _normal(1, (4, 5))
    layer = nn.RMSNorm(reduction_axes=(1, 2), feature_axes=(1, 2))
    got = ops.rms_norm(x, scale, axis=(-1, -2))
    np.testing.assert_allclose(got, _flax(layer, x, scale), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("save", ["input", "output"])
def test_leading_axis(save):
    x, scale, bias = _normal(0, (8, 3)), 1 + _normal(1, 8) / 4, _normal(2, 8)

    def loss(x, s, b, turned):
        norm = functools.partial(ops.layer_norm, save=save)
        y = norm(x.T, s, b).T if turned else norm(x, s, b, axis=0)
        return jnp.sum(jnp.sin(y))

    grad = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)
    for got, want in zip(
        grad(x, scale, bias, False), grad(x, scale, bias, True), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


NAMED = {
    "batch_norm": lambda x, **k: ops.batch_norm(x, **k)[0],
    "layer_norm": functools.partial(ops.layer_norm, axis=0),
    "group_norm": functools.partial(
        ops.group_norm, num_groups=2, reduction_axes=(0, 1)
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_statistics_over_a_named_axis(name):
    op, x = NAMED[name], _normal(0, (4, 3, 6))

    def loss(x, split):
        if split:
            y = jax.vmap(functools.partial(op, axis_name="n"), axis_name="n")(x)
        else:
            y = op(x.reshape(12, 6)).reshape(x.shape)
        return jnp.sum(jnp.sin(y)), y

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, got), dgot = run(x, True)
    (_, want), dwant = run(x, False)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dgot, dwant, rtol=1e-5, atol=1e-5)


def test_batch_statistics_have_the_plain_gradient():
    x, s, b = _normal(0, (6, 8)), _normal(1, 8), _normal(2, 8)
    loss = lambda op, x: sum(jnp.sum(jnp.sin(a)) for a in op(x, s, b))
    got = jax.jit(jax.grad(functools.partial(loss, ops.batch_norm)))(x)
    want = jax.jit(jax.grad(functools.partial(loss, plain.plain_batch_norm)))(x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# -- small scales: relative errors of the gradients of x and of the scale with
# bfloat16 outputs, D = 1024, 16 guarded channels.


def _sharding(size, seed=1):
    return np.random.default_rng(seed).standard_normal(size)


def _few(value):
    """Scales near one with 1 in 100 channels (fewer than are guarded) at `value`."""
    scale = 1 + 0.1 * _sharding(D)
    scale[::100] = value
    return scale


SCALES = {
    # name: (scale, size of bias, bound on the error of dx, of dscale)
    "near one": (1 + 0.1 * _sharding(D), 0.1, 5e-4, 5e-3),
    "small": (0.1 * (1 + 0.1 * _sharding(D)), 0.5, 2e-3, 3e-2),
    "1% at 1e-4": (_few(1e-4), 0.1, 5e-4, 5e-3),
    "1% at 0": (_few(0.0), 0.1, 5e-4, 5e-3),
}


def _error(scale, bias, save):
    """Relative errors in the norm of the gradients of x and scale, against float64."""
    x, g = _normal(0, (256, D), "bfloat16"), _normal(3, (256, D), "bfloat16")

    def grads(x, s, b, g, **kwargs):
        _, pull = jax.vjp(lambda x, s: ops.layer_norm(x, s, b, **kwargs), x, s)
        return pull(g)

    got = jax.jit(functools.partial(grads, save=save))(x, scale, bias, g)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, "f8")) for a in (x, scale, bias, g)]
        want = [np.asarray(a) for a in jax.jit(grads)(*wide)]
    pairs = zip(got, want, strict=True)
    return [
        np.linalg.norm(np.asarray(a, "f8") - b) / np.linalg.norm(b) for a, b in pairs
    ]


def _trace_anew():
    for made in (keep_output, marked_output):
        made.cache_clear()


def _without_guard(monkeypatch):
    _trace_anew()
    monkeypatch.setattr(from_output, "guard", lambda *args: (None, None))


@pytest.fixture
def fresh():
    _trace_anew()
    yield
    _trace_anew()


@pytest.mark.fast("small", "1% at 0")
@pytest.mark.parametrize("name", SCALES)
def test_small_scales_are_guarded(name, fresh, monkeypatch):
    scale, size, dx_bound, dscale_bound = SCALES[name]
    scale = jnp.asarray(scale, "float32")
    bias = jnp.asarray(size * _sharding(D, 2), "float32")
    # The gradient of x is rounded to bfloat16 by either.
    rounding = _error(scale, bias, "input")[0]
    dx, dscale = _error(scale, bias, "output")
    assert dx < rounding + dx_bound
    assert dscale < dscale_bound
    if "%" in name:
        _without_guard(monkeypatch)
        assert _error(scale, bias, "output")[1] > 10 * dscale_bound


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_all_scales_zero_stay_finite(bias):
    x, zero = _normal(0, (4, 130)), jnp.zeros(130)
    loss = lambda x, s, b: jnp.sum(jnp.sin(ops.layer_norm(x, s, b, save="output")))
    grads = jax.jit(jax.grad(loss, (0, 1, 2)))(x, zero, jnp.full(130, bias))
    assert all(np.isfinite(g).all() for g in grads)
    # Two channels of 130 are guarded; what is beyond has no gradient, as stated.
    assert np.count_nonzero(grads[1]) == 2


def test_constant_rows_stay_finite():
    x = jnp.full((3, 64), 300.0)
    for save in ("input", "output"):
        norm = functools.partial(ops.layer_norm, save=save)
        total = lambda x, s, norm=norm: norm(x, s).sum()
        grads = jax.jit(jax.grad(total, (0, 1)))(x, jnp.ones(64))
        assert all(np.isfinite(g).all() for g in grads)


SECOND = {
    "layer_norm": (ops.layer_norm, plain.plain_layer_norm),
    "layer_norm output": (
        functools.partial(ops.layer_norm, save="output"),
        plain.plain_layer_norm,
    ),
    "batch_norm": (
        lambda *a: ops.batch_norm(*a)[0],
        lambda *a: plain.plain_batch_norm(*a)[0],
    ),
}


@pytest.mark.fast("layer_norm output", "batch_norm")
@pytest.mark.parametrize("name", SECOND)
def test_second_derivative(name):
    lean, reference = SECOND[name]
    args = _normal(0, (6, 8)), 1 + _normal(1, 8) / 4, _normal(2, 8) / 4

    def penalty(op, *args):
        inner = jax.grad(lambda *a: jnp.sum(jnp.sin(op(*a))), (0, 1, 2))(*args)
        return sum(jnp.sum(jnp.cos(g)) for g in inner)

    second = lambda op: jax.jit(jax.grad(functools.partial(penalty, op), (0, 1, 2)))
    got, want = second(lean)(*args), second(reference)(*args)
    for a, b in zip(got, want, strict=True):
        # Cancellations in the recovered input: some tens of float32 roundings.
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


X = jnp.ones((2, 3, 8))
BAD = [
    (lambda: ops.layer_norm(X, jnp.ones(3)), "scale has shape"),
    (lambda: ops.layer_norm(X, axis=3), "out of range"),
    (lambda: ops.layer_norm(X, axis=(-1, 2)), "twice"),
    (lambda: ops.layer_norm(X, save="both"), "save='both'"),
    (lambda: ops.layer_norm(X, axis=(1, 2), save="output"), "takes one axis"),
    (lambda: ops.layer_norm(X, axis_name="n", save="output"), "axis_name"),
    (lambda: ops.layer_norm(X, mask=jnp.ones((2, 2), bool)), "does not broadcast"),
    (lambda: ops.rms_norm(X, save=""), "save=''"),
    (lambda: ops.group_norm(X, num_groups=3), "does not divide"),
    (lambda: ops.group_norm(X, num_groups=2, reduction_axes=(0, 1)), "last axis"),
    (lambda: ops.batch_norm(X, mean=jnp.ones(8)), "both or neither"),
    (lambda: ops.batch_norm(X, axis=(0, 1, 2)), "leaves none"),
]


@pytest.mark.parametrize("call,message", BAD, ids=[m for _, m in BAD])
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("size, count", [(1, 1), (64, 1), (1000, 15), (1000, 1000)])
@pytest.mark.parametrize("kind", ["drawn", "ties", "alike", "not a number"])
def test_the_smallest_are_those_of_top_k(size, count, kind):
    score = jax.random.uniform(jax.random.key(size), (size,))
    if kind == "ties":
        score = jnp.round(4 * score)
    elif kind == "alike":
        score = jnp.ones(size)
    elif kind == "not a number":  # each place comes once, whatever is in it
        score = jnp.where(score < 0.5, jnp.nan, score)
        found = np.asarray(from_output.smallest(score, count))
        assert len(set(found)) == count and found.min() >= 0 and found.max() < size
        return
    found = jax.jit(from_output.smallest, static_argnums=1)(score, count)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, jax.lax.top_k(-score, count)[1])


def test_the_smallest_of_many_are_sorted(monkeypatch):
    score = jax.random.uniform(jax.random.key(0), (100,))
    few = from_output.smallest(score, 7)
    monkeypatch.setattr(from_output, "_FEW", 99)
    np.testing.assert_array_equal(from_output.smallest(score, 7), few)


@pytest.mark.parametrize(
    "shape", [(6, 5), (4096, 8), (2, 2048, 8), (16, 3, 8), (64, 7, 8), (3, 4, 5, 8)]
)
def test_sums_by_groups_are_sums(shape):
    like, row = jnp.zeros(shape), jax.random.normal(jax.random.key(0), shape[-1:])
    spread = functools.partial(
        from_output.by_groups, like=like, features=(len(shape) - 1,)
    )
    np.testing.assert_array_equal(spread(row), jnp.broadcast_to(row, shape))
    g = jax.random.normal(jax.random.key(1), shape)
    (got,) = jax.vjp(spread, row)[1](g)
    want = np.asarray(g, np.float64).reshape(-1, shape[-1]).sum(0)
    # the rounding of as many float32 additions of numbers of size one
    rows = g.size // shape[-1]
    np.testing.assert_allclose(got, want, atol=2.0**-24 * rows * np.sqrt(rows) + 1e-6)


def test_sums_are_by_groups_of_rows():
    like = jnp.zeros((2, 2048, 8))
    spread = functools.partial(from_output.by_groups, like=like, features=(2,))
    jaxpr = jax.make_jaxpr(lambda g: jax.vjp(spread, like[0, 0])[1](g))(like)
    sums = [e for e in jaxpr.eqns if e.primitive.name == "reduce_sum"]
    rows = [e.invars[0].aval.size // e.outvars[0].aval.size for e in sums]
    assert rows == [2048 // 16, 2 * 16]
