"""Every formula is found, computes what it did, and keeps less."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import rewriting
from tests.references import kept_bytes
from tests.rewriting.formulas import FORMULAS, cast_product
from tests.sets import first_fast

# Plain and lean each round a few times in float32; the largest terms are about 10.
TOLERANCE = 2e-5
# The formulas are written for the usual promotion, as flax and jax.nn are.
pytestmark = pytest.mark.usefixtures("standard_promotion")
by_id = functools.partial(pytest.mark.parametrize, ids=lambda f: f.id)
# What keeps less, and what widens, is the op: one formula of each is fast.
of_each_op = functools.partial(first_fast, kind=lambda f: f.name)


@pytest.fixture
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def values_and_gradients(fns, args, wanted):
    """Of each function, compiled in one program."""

    def loss(fn, *some):
        out = fn(*some, *args[len(wanted) :])
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(out.astype(jnp.float32) * weights), out

    def run(fn, *some):
        found = jax.value_and_grad(functools.partial(loss, fn), wanted, has_aux=True)
        (_, out), gradients = found(*some)
        return [out, *gradients]

    return jax.jit(lambda *some: [run(fn, *some) for fn in fns])(*args[: len(wanted)])


@by_id("formula", FORMULAS)
def test_is_found_once(formula):
    report = rewriting.find(formula.fn, *formula.args())
    assert report.counts == {formula.name: 1}, str(report)


@by_id("formula", FORMULAS)
def test_values_and_gradients_are_the_same(formula):
    args, wanted = formula.args(), tuple(range(len(formula.shapes)))
    both = formula.fn, rewriting.rewrite(formula.fn)
    plain, lean = values_and_gradients(both, args, wanted)
    for a, b in zip(plain, lean, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


@by_id("formula", of_each_op(FORMULAS))
def test_is_found_in_bfloat16_and_its_output_type_stays(formula):
    args = formula.args(jnp.bfloat16)
    assert rewriting.find(formula.fn, *args).counts == {formula.name: 1}
    plain = jax.eval_shape(formula.fn, *args)
    lean = jax.eval_shape(rewriting.rewrite(formula.fn), *args)
    assert (plain.shape, plain.dtype) == (lean.shape, lean.dtype)


@by_id("formula", of_each_op(f for f in FORMULAS if f.saves))
def test_keeps_less(formula):
    args, wanted = formula.args(), frozenset(range(len(formula.shapes)))
    plain = kept_bytes(formula.fn, args, wanted)
    lean = kept_bytes(rewriting.rewrite(formula.fn), args, wanted)
    assert lean < plain


def test_cast_weights_are_not_kept():
    x = jnp.ones((2, 8), jnp.bfloat16)
    w = jnp.ones((8, 16), jnp.float32)
    lean = rewriting.rewrite(cast_product)
    assert rewriting.find(cast_product, x, w).counts == {"dense": 1}
    assert kept_bytes(cast_product, (x, w), {0, 1}) == 8 * 16 * 2
    assert kept_bytes(lean, (x, w), {0, 1}) == 0
    np.testing.assert_array_equal(cast_product(x, w), lean(x, w))


@pytest.mark.parametrize("axes", ["channels first", "dilated"])
def test_another_pooling_is_left(axes):
    window = (1, 1, 2, 2) if axes == "channels first" else (1, 2, 2, 1)
    options = {} if axes == "channels first" else {"window_dilation": (1, 2, 2, 1)}
    pool = lambda x: jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, window, window, "VALID", **options
    )
    assert rewriting.find(pool, jnp.ones((2, 8, 8, 4))).counts == {}


def test_save_chooses_what_gelu_keeps():
    def fn(x):
        return jax.nn.gelu(x) + 0

    x = jnp.ones((8, 16))
    by_input = rewriting.rewrite(fn, rewriting.library(save="input"))
    by_output = rewriting.rewrite(fn, rewriting.library(save="output"))
    assert kept_bytes(by_input, (x,), {0}) == 0
    assert kept_bytes(by_output, (x,), {0}) > 0


@pytest.mark.parametrize("name", ["save", "norm_save"])
def test_library_refuses_other_words(name):
    with pytest.raises(ValueError, match=f"{name}='outputs': one of 'input', 'output'"):
        rewriting.library(**{name: "outputs"})


@pytest.mark.fast("where-True", "times-False", "flax-False")
@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("form", ["where", "times", "flax"])
def test_dropout_draws_another_mask_of_the_same_law(form, raw):
    import flax.linen as nn

    key = jax.random.PRNGKey(3) if raw else jax.random.key(3)
    x = jnp.ones((64, 64))

    def fn(x, key):
        if form == "flax":
            module = nn.Dropout(0.25, deterministic=False)
            return module.apply({}, x, rngs={"dropout": key})
        mask = jax.random.bernoulli(key, 0.75, x.shape)
        return jnp.where(mask, x / 0.75, 0) if form == "where" else x * mask / 0.75

    lean = jax.jit(rewriting.rewrite(fn))
    assert rewriting.find(fn, x, key).counts == {"dropout": 1}
    out = lean(x, key)
    np.testing.assert_array_equal(jnp.unique(out), np.float32([0, 1 / 0.75]))
    # 4096 draws: the mean is within four standard deviations.
    assert abs(float(jnp.mean(out)) - 1) < 4 * (0.25 / 0.75 / 4096) ** 0.5
    np.testing.assert_array_equal(out, lean(x, key))
    gradient = jax.grad(lambda x: lean(x, key).sum())(x)
    np.testing.assert_array_equal(gradient, out)


@pytest.mark.parametrize("broadcast", [True, False])
def test_attention_with_dropout(broadcast):
    import flax.linen as nn

    def fn(q, key):
        return nn.dot_product_attention(
            q, q, q, dropout_rng=key, dropout_rate=0.1, broadcast_dropout=broadcast
        )

    q, key = jnp.ones((2, 64, 3, 8)), jax.random.key(0)
    assert rewriting.find(fn, q, key).counts == {"dot_product_attention": 1}
    out = rewriting.rewrite(fn)(q, key)
    # Each output is the mean of 64 kept-or-dropped ones: spread (0.1/0.9/64)^0.5.
    assert 0 < float(jnp.abs(out - 1).max()) < 6 * (0.1 / 0.9 / 64) ** 0.5
    assert abs(float(out.mean()) - 1) < 0.02
