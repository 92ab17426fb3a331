"""DPO and GRPO: values of the plain losses, and bytes without logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from examples.recipes import dpo, grpo

RECIPES = pytest.mark.parametrize("recipe", [dpo, grpo], ids=["dpo", "grpo"])


@functools.cache
def problem(recipe):
    """(parameters, what the loss takes besides)"""
    params, words = recipe.init(jax.random.key(0)), recipe.read_words()
    moved = jax.tree.map(lambda p: p + 0.01 * jnp.sign(p), params)
    if recipe is dpo:
        return moved, (params, next(dpo.pairs_of(words)))
    return moved, (grpo.write(params, words[: grpo.GROUPS], jax.random.key(1)),)


@RECIPES
def test_values_and_gradients_are_the_plain_ones(recipe):
    params, given = problem(recipe)
    value = lambda of: jax.jit(
        jax.value_and_grad(functools.partial(recipe.loss_fn, of=of))
    )
    got, grads = value(recipe.log_probability)(params, *given)
    want, others = value(recipe.plain_log_probability)(params, *given)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for name, g in grads.items():
        most = jnp.abs(others[name]).max()
        assert most > 0
        np.testing.assert_allclose(g, others[name], atol=1e-4 * most)


@RECIPES
def test_logits_are_not_made(recipe):
    params, given = problem(recipe)
    plain = functools.partial(recipe.step, of=recipe.plain_log_probability)
    arguments = params, recipe.TX.init(params), *given
    how = {"donate_argnums": (0, 1)}
    reports = [jaxmem.estimate(x, *arguments, **how) for x in (recipe.step, plain)]
    texts = given[-1] if recipe is dpo else given[0][0]
    logits = 4 * texts[..., 1:].size * recipe.WORDS
    assert reports[1].temp_bytes > logits > 2 * reports[0].temp_bytes


def test_a_policy_that_is_the_reference_has_the_loss_of_a_coin():
    params, (_, pairs) = problem(dpo)
    loss = jax.jit(dpo.loss_fn)(params, params, pairs)
    assert loss == pytest.approx(np.log(2), rel=1e-6)


def test_advantages_are_of_a_group():
    """The first step's loss is minus the mean advantage, none; a ratio is clipped."""
    params, (written,) = problem(grpo)
    tokens, rewards, _ = written
    assert (tokens[..., 0] == tokens[:, :1, 0]).all()
    now = grpo.log_probability(params, tokens)
    assert abs(grpo.loss_fn(params, (tokens, rewards, now))) < 1e-5
    far = grpo.loss_fn(params, (tokens, rewards, now - 10))  # ratios of e**10
    above = rewards - rewards.mean(-1, keepdims=True)
    scaled = above / (rewards.std(-1, keepdims=True) + 1e-6)
    ratio = jnp.where(scaled > 0, 1 + grpo.CLIP, jnp.exp(10.0))
    np.testing.assert_allclose(far, -(ratio * scaled).mean(), rtol=1e-3)
