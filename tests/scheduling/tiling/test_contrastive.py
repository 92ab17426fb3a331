"""Losses of a batch against itself: the queries are of the same arrays as the keys."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jaxmem import schedule
from jaxmem.scheduling import BudgetError
from jaxmem.scheduling.tiling.vocabulary_tiles import VocabularyTiles
from tests.scheduling.tiling.test_vocabulary import EPS, tiled

BATCH, STEPS, RATE = 26, 3, 0.1  # the last of four blocks is smaller
WIDTH = 16


def encoded(p, x):
    return jnp.tanh(x @ p.astype(x.dtype))


def nll(logits):
    """Each one's own key is the right one."""
    labels = jnp.arange(BATCH)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def indexed(logits):
    places = jnp.arange(BATCH)
    return -jax.nn.log_softmax(logits)[places, places].mean()


def normalised(x):
    return x * lax.rsqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-6)


def stopped_keys(p, x):
    h = encoded(p, x)
    return nll(h @ lax.stop_gradient(h).T)


def stopped_queries(p, x):
    h = encoded(p, x)
    return nll(lax.stop_gradient(h) @ h.T)


def both_sides(p, x):
    h = encoded(p, x)
    return nll(h @ h.T)


def symmetric(p, x):
    h = encoded(p, x)
    logits = h @ lax.stop_gradient(h).T
    return (nll(logits) + nll(logits.T)) / 2


def with_temperature(p, x):
    h = encoded(p, x)
    return nll(h @ lax.stop_gradient(h).T / 0.5)


def of_normalised(p, x):
    h = normalised(encoded(p, x))
    return nll(h @ lax.stop_gradient(h).T / 0.5)


def by_index(p, x):
    h = encoded(p, x)
    return indexed(h @ lax.stop_gradient(h).T)


def of_sequences(p, x):
    h = encoded(p, jnp.stack([x, x[::-1]], 1))
    return indexed(jnp.einsum("btd,ctd->bc", h, lax.stop_gradient(h)))


def narrow(p, x):
    h = encoded(p, x.astype(jnp.bfloat16))
    logits = h @ lax.stop_gradient(h).T
    return nll(logits.astype(jnp.float32))


def without_oneself(p, x):
    """As SimCLR has it: the other half of the batch has the right ones."""
    h = normalised(encoded(p, x))
    own = jnp.eye(BATCH, dtype=bool)
    logits = jnp.where(own, -1e9, h @ lax.stop_gradient(h).T / 0.5)
    labels = (jnp.arange(BATCH) + BATCH // 2) % BATCH
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


FORMS = [
    *(stopped_keys, stopped_queries, both_sides, symmetric, with_temperature),
    *(of_normalised, by_index, of_sequences, narrow, without_oneself),
]


def step_of(loss):
    def step(p, x):
        value, gradient = jax.value_and_grad(loss)(p, x)
        return p - RATE * gradient, value

    return step


def example():
    r = np.random.default_rng(0)
    p = jnp.asarray(r.standard_normal((WIDTH, WIDTH)) / 16, jnp.float32)
    return p, jnp.asarray(r.standard_normal((BATCH, WIDTH)), jnp.float32)


def trained(step, p, x):
    values = []
    for _ in range(STEPS):
        p, value = step(p, x)
        values.append(float(value))
    return np.asarray(p), np.asarray(values)


def assert_trains_alike(got, want, eps):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=eps * np.abs(w).max())


@pytest.mark.fast(
    "stopped_keys",
    "symmetric",
    "of_normalised",
    "by_index",
    "of_sequences",
    "narrow",
)
@pytest.mark.parametrize("loss", FORMS, ids=lambda f: f.__name__)
def test_a_batch_against_itself_trains_alike(loss):
    step, args = step_of(loss), example()
    run, done = tiled(step, args, VocabularyTiles(n=4))
    # with both sides trained one product needs the array whole along both its axes
    assert done.did(VocabularyTiles) is (loss is not both_sides), done.notes
    eps = EPS["bfloat16"] if loss is narrow else BATCH * EPS["float32"]
    got, want = (trained(jax.jit(one), *args) for one in (run, step))
    assert_trains_alike(got, want, eps)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [stopped_keys, both_sides], ids=lambda f: f.__name__)
def test_a_batch_against_itself_under_a_budget(loss):
    step, (p, x) = step_of(loss), example()
    how = {"target": "cpu", "donate_argnums": 0, "progress": False}
    plan = schedule(step, **how).plan(p, x)
    with pytest.raises(BudgetError) as least:
        schedule(step, 1, **how).plan(p, x)
    assert least.value.least <= plan.plain.peak_bytes
    scheduled = schedule(step, least.value.least, **how)
    want = trained(jax.jit(step), p, x)
    got = trained(scheduled, jnp.copy(p), x)
    assert_trains_alike(got, want, BATCH * EPS["float32"])
