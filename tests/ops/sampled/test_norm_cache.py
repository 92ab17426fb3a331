"""Norms of gradients kept from step to step: what is kept, that it helps, no bias."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.ops import sampled_dense
from jaxmem.ops.sampled.norm_cache import row_factors
from tests.arrays import array
from tests.references import kept_bytes

KEY = jax.random.key(3)
SAMPLES, TOKENS, D, F = 3, 4, 6, 4  # 12 rows


def arrays(dtype="float32", seed=0, samples=SAMPLES):
    """x, kernel, and output gradients whose rows differ a hundredfold in norm."""
    rng = np.random.default_rng(seed)
    normal = lambda *s: array(rng.standard_normal(s), dtype)
    size = array(10 ** rng.uniform(-1, 1, (samples, TOKENS, 1)), dtype)
    x, kernel = normal(samples, TOKENS, D), normal(D, F)
    return x, kernel, normal(samples, TOKENS, F) * size


def norms_of(g):
    return jnp.sqrt(jnp.square(g.astype("float32")).sum(-1))


@functools.partial(jax.jit, static_argnames=("budget", "method"))
def gradients(kernel, cache, x, g, ids=None, **options):
    """The gradients of the kernel and of the cache."""

    def fn(kernel, cache):
        return sampled_dense(x, kernel, norm_cache=cache, sample_ids=ids, **options)

    return jax.vjp(fn, kernel, cache)[1](g)


@functools.partial(jax.jit, static_argnames=("method", "draws"))
def estimates(x, kernel, g, cache, ids, method, draws):
    options = dict(budget=0.4, method=method)
    keys = jax.random.split(KEY, draws)
    one = lambda key: gradients(kernel, cache, x, g, ids, key=key, **options)[0]
    return jax.vmap(one)(keys)


# -- what the cache becomes


@pytest.mark.parametrize("budget", [0.4, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_gradient_is_the_norms(dtype, budget):
    x, kernel, g = arrays(dtype)
    cache = jnp.zeros((SAMPLES, TOKENS))
    _, new = gradients(kernel, cache, x, g, key=KEY, budget=budget)
    np.testing.assert_allclose(new, norms_of(g), rtol=1e-6)


def test_samples_not_in_the_batch_keep_theirs():
    """-1, and a number past the end, have no place and overwrite nothing."""
    x, kernel, g = arrays()
    cache = jnp.full((5, TOKENS), 7.0)
    for ids, kept in (((4, 1, 2), (0, 3)), ((-1, 2, 5), (0, 1, 3, 4))):
        new = gradients(kernel, cache, x, g, jnp.array(ids), key=KEY)[1]
        assert (new[jnp.array(kept)] == 7).all()
        for place, norms in zip(ids, norms_of(g), strict=True):
            if 0 <= place < 5:
                np.testing.assert_allclose(new[place], norms, rtol=1e-6)


def transformed(how, kernel, cache, x, g):
    """The new caches of two layers, stacked."""

    def one(kernel, cache):
        return sampled_dense(x, kernel, key=KEY, norm_cache=cache)

    if how == "remat":
        one = jax.checkpoint(one)

    def run(kernel, cache):
        if how == "vmap":
            return jax.vmap(one)(kernel, cache)
        return jax.lax.scan(lambda _, xs: (None, one(*xs)), None, (kernel, cache))[1]

    return jax.jit(jax.vjp(run, kernel, cache)[1])(jnp.stack([g, 2 * g]))[1]


@pytest.mark.parametrize("how", ["scan", "remat", "vmap"])
def test_under_transforms(how):
    x, kernel, g = arrays()
    caches = jnp.zeros((2, SAMPLES, TOKENS))
    got = transformed(how, jnp.stack([kernel, kernel]), caches, x, g)
    np.testing.assert_allclose(
        got, jnp.stack([norms_of(g), 2 * norms_of(g)]), rtol=1e-6
    )


@pytest.mark.parametrize("how", ["jit", "shard_map"])
def test_over_devices(how):
    """The cache lies as the batch does; inside shard_map each device has its part."""
    x, kernel, g = arrays(samples=8)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    args = (
        put(kernel, P()),
        put(jnp.zeros((8, TOKENS)), P("d")),
        *(put(a, P("d")) for a in (x, g)),
    )
    run = lambda *args: gradients(*args, key=KEY)
    if how == "shard_map":
        specs = P(), P("d"), P("d"), P("d")
        whole = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(P(), P("d")))
        run = jax.jit(whole)
    np.testing.assert_allclose(run(*args)[1], norms_of(g), rtol=1e-6)


# -- the estimate


def caches(case):
    """(cache, numbers): nothing known, a part, all of it, and the contrary of it."""
    norms = norms_of(arrays()[2])
    if case == "unknown":
        return jnp.zeros((SAMPLES, TOKENS)), None
    if case == "in part":
        return jnp.zeros((5, TOKENS)).at[3].set(norms[1]), jnp.array([-1, 3, 0])
    if case == "wrong":
        return 1 / norms, None
    if case == "zeros and infinities":
        return norms.at[0, :2].set(0).at[1, 1].set(jnp.inf).at[2, 2].set(jnp.nan), None
    return jnp.zeros((5, TOKENS)).at[1:4].set(norms), jnp.array([1, 2, 3])


CASES = ("unknown", "in part", "wrong", "zeros and infinities", "known")


@pytest.mark.fast("wta-known", "wta-wrong", "crs-zeros and infinities")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", ["wta", "crs"])
def test_is_unbiased_whatever_is_cached(method, case):
    """The mean of 4,000 draws lies within five of its standard errors, everywhere.

    So far off, one in two million is, and there are 24 elements.
    """
    x, kernel, g = arrays()
    draws = np.asarray(estimates(x, kernel, g, *caches(case), method, 4000), "f8")
    exact = np.einsum("std,stf->df", *(np.asarray(a, "f8") for a in (x, g)))
    standard = draws.std(0) / np.sqrt(len(draws))
    assert standard.min() > 0
    assert np.abs((draws.mean(0) - exact) / standard).max() < 5


@functools.cache
def errors(case, method):
    """Squared errors of 400 draws."""
    x, kernel, g = arrays()
    draws = np.asarray(estimates(x, kernel, g, *caches(case), method, 400), "f8")
    exact = np.einsum("std,stf->df", *(np.asarray(a, "f8") for a in (x, g)))
    return np.square(draws - exact).sum((1, 2))


def standard_errors_between(a, b):
    spread = np.hypot(a.std() / len(a) ** 0.5, b.std() / len(b) ** 0.5)
    return (a.mean() - b.mean()) / spread


@pytest.mark.parametrize("method", ["wta", "crs"])
def test_known_norms_lower_the_error(method):
    """By more than five standard errors of the difference of the mean squares."""
    unknown, known = errors("unknown", method), errors("known", method)
    assert standard_errors_between(unknown, known) > 5


@pytest.mark.parametrize("case", CASES)
def test_a_tenth_of_the_probability_is_that_without_a_cache(case):
    """And the rest is by the norms: so no weight is more than ten times as large."""
    x = arrays()[0]
    size = np.asarray(norms_of(x)).reshape(-1)
    chosen = size * np.asarray(row_factors(x, *caches(case)))
    plain, chosen = size / size.sum(), chosen / chosen.sum()
    assert (chosen >= 0.1 * plain * (1 - 1e-5)).all()
    if case == "unknown":
        np.testing.assert_allclose(chosen, plain, rtol=1e-5)
    if case in ("known", "wrong"):
        cached, ids = caches(case)
        by_norms = size * np.asarray(cached if ids is None else cached[ids]).reshape(-1)
        want = 0.1 * plain + 0.9 * by_norms / by_norms.sum()
        np.testing.assert_allclose(chosen, want, rtol=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e37])
def test_factors_do_not_depend_on_the_size_of_all_norms(size):
    """The sum of large ones would not be finite; here with a sample not seen yet."""
    norms = norms_of(arrays()[2])
    cache = jnp.concatenate([norms / norms.max(), jnp.zeros((1, TOKENS))])
    ids = jnp.array([0, 1, SAMPLES])
    factors = row_factors(arrays()[0], cache, ids)
    scaled = row_factors(arrays()[0], size * cache, ids)
    np.testing.assert_allclose(scaled, factors, rtol=1e-5)


def test_rows_of_zeros_have_finite_factors():
    """Of x, or of all that a cache knows of the rows that are none."""
    x, _, g = arrays()
    for zeros, norms in (
        (0 * x, norms_of(g)),
        (x.at[0].set(0), norms_of(g.at[1:].set(0))),
    ):
        factors = row_factors(zeros, norms, None)
        assert jnp.isfinite(factors).all()
        assert (factors > 0).all()


# -- what is kept


@pytest.mark.parametrize("numbered", [False, True])
def test_keeps_no_more(numbered):
    """Beside its arguments, among which are the cache and the numbers."""
    x, kernel, _ = arrays("bfloat16", samples=5)
    cache, ids = jnp.zeros((9, TOKENS)), jnp.arange(5)
    cache, ids = (cache, ids) if numbered else (cache[:5], None)

    def fn(kernel, cache):
        return sampled_dense(x, kernel, key=KEY, norm_cache=cache, sample_ids=ids)

    plain = lambda kernel: sampled_dense(x, kernel, key=KEY)
    assert kept_bytes(plain, (kernel,), {0}) == 6 * (D * 2 + 4)
    assert kept_bytes(fn, (kernel, cache), {0, 1}) == 6 * (D * 2 + 4)
    assert kept_bytes(fn, (kernel, cache), {1}) == 0


@pytest.mark.parametrize("numbered", [False, True])
def test_a_scan_of_layers_stacks_no_more(numbered):
    x = arrays(samples=5)[0]
    kernels, ids = jnp.ones((3, D, D)), None
    stack = jnp.zeros((3, 9 if numbered else 5, TOKENS))
    if numbered:
        ids = jnp.arange(5)

    def run(kernels, stack, cached=True):
        def body(x, layer):
            kernel, cache = layer
            how = dict(norm_cache=cache, sample_ids=ids) if cached else {}
            return sampled_dense(x, kernel, key=KEY, **how), None

        return jax.lax.scan(body, x, (kernels, stack))[0]

    plain = functools.partial(run, cached=False)
    wanted = kept_bytes(plain, (kernels, stack), {0})
    assert kept_bytes(run, (kernels, stack), {0, 1}) == wanted


# -- errors

X, KERNEL, _ = arrays()
CACHED = functools.partial(sampled_dense, X, KERNEL, key=KEY)
NORMS = jnp.ones((SAMPLES, TOKENS))
BAD = [
    (lambda: CACHED(norm_cache=NORMS[:2]), "sample_ids allow any first axis"),
    (lambda: CACHED(norm_cache=NORMS[:, :2]), r"norm_cache=.*\(3, 4\)"),
    (lambda: CACHED(norm_cache=NORMS[:, :2], sample_ids=jnp.arange(3)), r"\(3, 4\)"),
    (lambda: CACHED(norm_cache=NORMS, sample_ids=jnp.arange(2)), "sample_ids=.*(3,)"),
    (lambda: CACHED(sample_ids=jnp.arange(3)), "None without a norm_cache"),
    (lambda: CACHED(norm_cache=NORMS, row_norms=NORMS), "not both"),
    (lambda: CACHED(norm_cache=NORMS, method="gaussian"), "a norm_cache is for wta"),
    (
        lambda: sampled_dense(X[0, 0], KERNEL, key=KEY, norm_cache=NORMS),
        "of two axes or more",
    ),
]


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("call,message", BAD, ids=[m for _, m in BAD])
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
