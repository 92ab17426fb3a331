"""A loss head in blocks of the vocabulary, where nobody asked for fewer bytes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem.scheduling.search import driver
from jaxmem.scheduling.tiling.vocabulary_tiles import VocabularyTiles

TOKENS, WIDTH, WORDS = 8192, 512, 32768


def gradient(words, layers=4):
    """Of a small language model with layers in a scan, and its arguments."""

    def loss(p, x, labels):
        layer = lambda x, w: (x + jax.nn.gelu(x @ w), None)
        logits = jax.lax.scan(layer, x, p["layers"])[0] @ p["head"]
        of_each = optax.softmax_cross_entropy_with_integer_labels
        return of_each(logits.astype("float32"), labels).mean()

    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    params = {"layers": of(layers, WIDTH, WIDTH), "head": of(WIDTH, words)}
    labels = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    return jax.grad(loss), (params, of(TOKENS, WIDTH), labels)


@functools.cache
def planned(words, budget=None, **how):
    step, args = gradient(words)
    return jaxmem.schedule(step, budget, target="h100", **how).plan(*args)


def blocks(plan):
    return [row.n for row in plan.tiles if row.axis == "vocabulary"]


def limits(plan):
    """Of the blocks that were tried, in order."""
    tried = (t.choice.get(VocabularyTiles).limit for t in plan.tried)
    return [limit for limit in tried if limit is not None]


def test_without_a_budget_logits_are_not_held_where_that_costs_no_time():
    plan, whole = planned(WORDS), planned(WORDS, tile=False)
    assert blocks(plan) and not whole.tiles
    assert plan.scheduled.peak_bytes < 0.5 * whole.scheduled.peak_bytes
    assert plan.scheduled.seconds <= 1.01 * whole.scheduled.seconds
    # each was compiled, and more blocks were tried until they took longer
    assert limits(plan) == sorted(limits(plan), reverse=True)


def test_small_logits_are_not_looked_at():
    assert not blocks(planned(256))
    assert len(planned(256).tried) == len(planned(256, tile=False).tried)


def test_a_search_for_a_budget_starts_from_there():
    least, whole = planned(WORDS), planned(WORDS, tile=False)
    budget = (whole.scheduled.peak_bytes + least.scheduled.peak_bytes) // 2
    plan = planned(WORDS, budget)
    assert blocks(plan)
    assert plan.scheduled.peak_bytes <= budget
    assert plan.scheduled.seconds <= least.scheduled.seconds  # in no more blocks


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_what_takes_longer_once_compiled_is_not_taken(slower, monkeypatch):
    made = driver.trial_of

    def trial_of(choice, report, *args, **kwargs):
        trial = made(choice, report, *args, **kwargs)
        if choice.get(VocabularyTiles) == VocabularyTiles():
            return trial
        return dataclasses.replace(trial, step_seconds=slower * trial.step_seconds)

    monkeypatch.setattr(driver, "trial_of", trial_of)
    step, args = gradient(WORDS, layers=3)
    how = {"target": "h100", "cache": False}
    plan = jaxmem.schedule(step, **how).plan(*args)
    assert bool(blocks(plan)) == (slower == 1.0)
    assert slower == 1.0 or len(limits(plan)) == 1


def test_a_step_that_its_compiler_refuses_is_put_in_as_many_blocks_as_fit(monkeypatch):
    """Nothing is known of its seconds, and what can run takes no longer."""
    made, most = driver.trial_of, TOKENS * WORDS

    def trial_of(choice, report, *args, **kwargs):
        limit = choice.get(VocabularyTiles).limit
        fits = limit is not None and limit < most
        return made(choice, report if fits else None, *args, **kwargs)

    monkeypatch.setattr(driver, "trial_of", trial_of)
    step, args = gradient(WORDS, layers=3)
    plan = jaxmem.schedule(step, target="h100", cache=False).plan(*args)
    assert limits(plan)[0] >= most > limits(plan)[-1]
    assert all(math.isinf(t.peak) for t in plan.tried[: -len(limits(plan)) + 1])
    assert blocks(plan)
    assert plan.scheduled.peak_bytes in [t.peak for t in plan.tried]
