"""Layers whose kernel gradient comes from a part of x: unbiased, and in few bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxmem.ir import jaxprs as _jaxpr
from jaxmem.ops import sampled_dense, velora_dense, velora_projection
from tests import references
from tests.arrays import array
from tests.references import Comparison, kept_bytes

METHODS = ("wta", "crs", "uniform", "gaussian", "rademacher")
KEY = jax.random.key(3)


def arrays(rows=12, d=6, f=4, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *s: array(rng.standard_normal(s), dtype)
    # rows of very different norms, one of them zero
    size = array(rng.exponential(size=(rows, 1)) ** 2, dtype).at[1].set(0)
    return normal(rows, d) * size, normal(d, f), normal(f), normal(rows, f)


@functools.partial(jax.jit, static_argnames=("budget", "method"))
def gradient(x, kernel, g, **options):
    """The estimate of the kernel's gradient."""
    return jax.vjp(lambda k: sampled_dense(x, k, **options), kernel)[1](g)[0]


@functools.partial(jax.jit, static_argnames=("method", "budget", "draws"))
def estimates(x, kernel, g, row_norms, method, budget, draws):
    options = dict(budget=budget, method=method, row_norms=row_norms)
    keys = jax.random.split(KEY, draws)
    return jax.vmap(lambda key: gradient(x, kernel, g, key=key, **options))(keys)


# -- the estimate


WEIGHTED = [(m, False) for m in METHODS] + [("wta", True)]


@pytest.mark.fast("uniform-False", "gaussian-False", "wta-True")
@pytest.mark.parametrize("method,weighted", WEIGHTED)
def test_is_unbiased(method, weighted):
    """The mean of 4,000 draws lies within five of its standard errors, everywhere.

    So far off, one in two million is, and there are 24 elements. A bias of a tenth of
    the spread of a draw would be at six.
    """
    x, kernel, _, g = arrays()
    norms = jnp.linalg.norm(g, axis=-1) if weighted else None
    draws = np.asarray(estimates(x, kernel, g, norms, method, 0.4, 4000), "f8")
    error = draws.mean(0) - np.asarray(x.T @ g)
    standard = draws.std(0) / np.sqrt(len(draws))
    assert standard.min() > 0
    assert np.abs(error / standard).max() < 5


def spread(method, weighted=False):
    x, kernel, _, g = arrays(64)
    g = g * jnp.linspace(0, 2, 64)[:, None] ** 4
    norms = jnp.linalg.norm(g, axis=-1) if weighted else None
    draws = estimates(x, kernel, g, norms, method, 0.3, 400)
    return float(jnp.square(draws - (x.T @ g)[None]).sum((1, 2)).mean())


def test_winner_takes_all_has_the_least_variance():
    """And knowing the gradient's norms helps."""
    wta, crs = spread("wta"), spread("crs")
    assert spread("wta", weighted=True) < wta < crs


@pytest.mark.parametrize("method", ["gaussian", "rademacher"])
def test_projections_err_as_stated(method):
    """|x| |dy| / sqrt(k) in Frobenius norms; the square within a third of 400 draws."""
    x, _, _, g = arrays(64)
    g = g * jnp.linspace(0, 2, 64)[:, None] ** 4
    stated = float(jnp.square(x).sum() * jnp.square(g).sum()) / 20
    assert spread(method) == pytest.approx(stated, rel=1 / 3)


@pytest.mark.parametrize("method", METHODS)
def test_a_whole_budget_is_exact(method):
    x, kernel, bias, g = arrays()
    fn = functools.partial(sampled_dense, key=KEY, budget=1.0, method=method)
    got = jax.vjp(fn, x, kernel, bias)[1](g)
    want = jax.vjp(lambda x, k, b: x @ k + b[None], x, kernel, bias)[1](g)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_winners_count_once():
    """Few rows that are not zero: all are taken as they are, and nothing is drawn."""
    x, kernel, _, g = arrays()
    x = x.at[4:].set(0)
    got = gradient(x, kernel, g, key=KEY, budget=0.5)
    np.testing.assert_allclose(got, x.T @ g, rtol=1e-5, atol=1e-6)


def test_zeros_give_zeros():
    x, kernel, _, g = arrays()
    for method in ("wta", "gaussian"):
        got = gradient(0 * x, kernel, g, key=KEY, method=method)
        np.testing.assert_array_equal(got, jnp.zeros_like(kernel))


# -- all but the kernel's gradient is exact, under every transform


def lean(method):
    def fn(x, kernel, bias):
        return sampled_dense(x, kernel, bias, key=KEY, method=method)

    return fn


def plain(x, kernel, bias):
    y = x @ kernel
    return y + jnp.broadcast_to(bias, y.shape)


def small_args(shape, dtype, rng):
    normal = lambda *s: array(rng.standard_normal(s), dtype)
    return normal(*shape), normal(shape[-1], 4), normal(4)


COMPARISONS = [
    *(
        Comparison(m, lean(m), plain, small_args, diff=(0, 2))
        for m in ("wta", "gaussian")
    ),
    Comparison(
        "velora",
        lambda x, k, b: velora_dense(x, k, b, projection=jnp.ones(1, k.dtype)),
        plain,
        small_args,
        diff=(0, 2),
    ),
]


@pytest.mark.parametrize("reference", COMPARISONS, ids=str)
def test_other_gradients_are_exact(reference):
    dtype = "bfloat16" if reference.name == "wta" else "float32"
    references.check_equal(reference, (3, 5, 6), dtype, "scan")


@pytest.mark.fast(
    "wta-remat",
    "wta-shard_map",
    "gaussian-remat_unrolled",
    "gaussian-scan",
    "gaussian-vmap",
)
@pytest.mark.parametrize("transform", sorted(set(references.TRANSFORMS) - {"jit"}))
@pytest.mark.parametrize("method", ["wta", "gaussian"])
def test_same_estimate_under_transform(method, transform):
    """A key gives one choice, under every transform."""
    want = gradient(*(arrays()[i] for i in (0, 1, 3)), key=KEY, method=method)
    x, kernel, bias, g = (jnp.stack([a, a]) for a in arrays())
    run = functools.partial(references.TRANSFORMS[transform], lean(method))
    got = jax.jit(lambda k: jax.vjp(lambda k: run(x, k, bias), k)[1](g)[0])(kernel)
    np.testing.assert_allclose(got, jnp.stack([want, want]), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["wta", "gaussian"])
def test_forward_mode_is_the_transpose(method):
    """<g, J t> = <J' g, t>: both modes take the same estimate."""
    x, kernel, bias, g = arrays()
    fn = functools.partial(lean(method), x, bias=bias)
    t = jnp.cos(kernel)
    forward = jax.jit(lambda k, t: jax.jvp(fn, (k,), (t,))[1])(kernel, t)
    backward = gradient(x, kernel, g, key=KEY, method=method)
    np.testing.assert_allclose(jnp.vdot(g, forward), jnp.vdot(backward, t), rtol=1e-4)


def test_in_bfloat16_is_that_of_float32_rounded():
    """Three roundings: P x, P dy, the result; of sums of up to twelve terms."""
    x, kernel, _, g = arrays(dtype="bfloat16")
    got = gradient(x, kernel, g, key=KEY, method="rademacher")
    assert got.dtype == jnp.bfloat16
    wide = [a.astype("float32") for a in (x, kernel, g)]
    want = gradient(*wide, key=KEY, method="rademacher")
    off = jnp.abs(got.astype("float32") - want).max()
    assert off <= 3 * 2**-8 * jnp.abs(want).max()


def test_narrow_compute_of_wide_parameters():
    x, kernel, bias, _ = arrays()
    fn = lambda k: sampled_dense(x, k, bias, key=KEY, dtype="bfloat16")
    assert jax.eval_shape(fn, kernel).dtype == jnp.bfloat16
    gradient = jax.eval_shape(lambda k: jax.grad(lambda k: fn(k).sum())(k), kernel)
    assert gradient.dtype == jnp.float32


def test_each_device_its_own_rows():
    """Data parallel: the sum over devices of their estimates is unbiased too."""
    x, kernel, _, g = arrays(32)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def one(key, x, kernel, g):
        key = jax.random.fold_in(key, jax.lax.axis_index("d"))
        return gradient(x, kernel, g, key=key, budget=0.5)

    specs = P(), P("d"), P(), P("d")
    whole = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P())
    run = jax.jit(lambda keys: jax.lax.map(lambda k: whole(k, x, kernel, g), keys))
    draws = np.asarray(run(jax.random.split(KEY, 1000)), "f8")
    standard = draws.std(0) / np.sqrt(len(draws))
    assert np.abs((draws.mean(0) - np.asarray(x.T @ g)) / standard).max() < 5


# -- what is kept


@pytest.mark.parametrize("wanted", references.subsets((0, 1, 2)), ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_keeps_the_rows_alone(method, wanted):
    x, kernel, bias, _ = arrays(20, dtype="bfloat16")
    x = x.reshape(4, 5, 6)
    kept = kept_bytes(lean(method), (x, kernel, bias), wanted)
    if 1 not in wanted:
        assert kept == 0
    elif method in ("gaussian", "rademacher"):
        assert kept == 6 * 6 * 2 + 8  # rows of P x, and the key
    else:
        assert kept == 6 * (6 * 2 + 4)


@pytest.mark.parametrize("method", ["wta", "gaussian"])
def test_a_scan_of_layers_stacks_the_rows_alone(method):
    """Neither a projection matrix nor all of x is kept or exists, stacked."""
    layers, rows, d = 3, 2048, 8
    x = jnp.ones((rows, d))

    def loss(kernels):
        def body(x, kernel):
            y = sampled_dense(x, kernel, key=KEY, budget=0.25, method=method)
            return jnp.abs(y), None

        return jax.lax.scan(body, x, kernels)[0].sum()

    kernels = jnp.ones((layers, d, d))
    kept = kept_bytes(loss, (kernels,), {0})
    signs = layers * rows * d  # what abs keeps, a float32 each
    assert kept <= layers * (rows // 4) * (4 * d + 4) + 4 * signs + 64
    if method == "gaussian":
        entries = rows // 4 * rows
        jaxpr = jax.make_jaxpr(jax.grad(loss))(kernels)
        shapes = [v.aval.shape for e in _jaxpr.walk(jaxpr) for v in e.outvars]
        assert max(map(np.prod, shapes)) <= entries


# -- VeLoRA


def test_velora_sees_one_direction():
    x, kernel, _, g = arrays()
    v = velora_projection(x, 2)
    got = jax.vjp(lambda k: velora_dense(x, k, projection=v, scale=2.0), kernel)[1](g)
    seen = x.reshape(12, 2, 3) @ v
    seen = jnp.multiply.outer(seen, v).reshape(12, 6)
    np.testing.assert_allclose(got[0], 2 * seen.T @ g, rtol=1e-5, atol=1e-5)


def test_velora_is_exact_where_the_vector_explains_all():
    x, kernel, _, g = arrays()
    v = velora_projection(x, 2)
    x = jnp.multiply.outer(jnp.cos(x)[:, :2], v).reshape(12, 6)
    got = jax.vjp(lambda k: velora_dense(x, k, projection=v), kernel)[1](g)[0]
    np.testing.assert_allclose(got, x.T @ g, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", references.subsets((0, 1, 2)), ids=str)
def test_velora_keeps_a_number_a_group(wanted):
    x, kernel, bias, _ = arrays(20, dtype="bfloat16")
    v = velora_projection(x, 2).astype("bfloat16")
    fn = lambda x, k, b: velora_dense(x, k, b, projection=v)
    assert kept_bytes(fn, (x, kernel, bias), wanted) == (80 if 1 in wanted else 0)


def test_velora_projection():
    x, *_ = arrays(seed=2)
    v = velora_projection(x, 3)
    mean = x.reshape(-1, 2).mean(0)
    np.testing.assert_allclose(v, mean / jnp.linalg.norm(mean), rtol=1e-5)
    np.testing.assert_allclose(velora_projection(0 * x, 3), 2**-0.5 * jnp.ones(2))


# -- errors

X, KERNEL, _, G = arrays()
SAMPLED = functools.partial(sampled_dense, X, KERNEL, key=KEY)
BAD = [
    (lambda: SAMPLED(budget=0.0), "budget=0.0"),
    (lambda: SAMPLED(budget=1.5), "budget=1.5"),
    (lambda: SAMPLED(method="dct"), "method='dct'"),
    (lambda: SAMPLED(method="uniform", row_norms=X[:, 0]), "row_norms are for"),
    (lambda: SAMPLED(row_norms=X[:3, 0]), "row_norms"),
    (lambda: sampled_dense(X, KERNEL.T, key=KEY), "as its last axis the first of"),
    (lambda: sampled_dense(X, KERNEL[0], key=KEY), "two axes"),
    (
        lambda: sampled_dense(X, KERNEL, key=jax.random.split(KEY)),
        "key=.*is not a key: pass one of",
    ),
    (lambda: velora_dense(X, KERNEL, projection=jnp.ones(4)), "divides the 6"),
    (lambda: velora_dense(X, KERNEL[0], projection=jnp.ones(3)), "two axes"),
    (lambda: velora_projection(X, 4), "groups=4"),
]


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("call,message", BAD, ids=[m for _, m in BAD])
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
