"""Adapters on a base in 4 bits: losses, what is trained, and what is not kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from examples.recipes import lora_quantized as recipe
from jaxmem.demo import data

STEPS = 3
DONATED = {"donate_argnums": (0, 1)}


@pytest.fixture(scope="module")
def params():
    base = recipe.make_base(jax.random.key(0))
    return recipe.with_adapters(base, jax.random.key(1))


@pytest.fixture(scope="module")
def part(params):
    return jaxmem.trainable(params, "**/lora_*")


def batches():
    text = data.standard_library(1_000_000).validation
    return data.batches(text, recipe.BATCH, recipe.TOKENS, seed=0)


def test_quantized_by_half_a_step_at_most():
    w = recipe.make_base(jax.random.key(0))["layers"]["up"]
    small = recipe.quantize(w)
    assert small["qvalue"].dtype == jnp.int4
    blocks = w.reshape(small["qvalue"].shape)
    error = jnp.abs(recipe.dequantize(small).reshape(blocks.shape) - blocks)
    assert (error <= 0.501 * small["scale"]).all()


def test_scheduled_losses_and_an_untouched_base(params, part):
    want, losses = recipe.train(jax.jit(recipe.step, **DONATED), part, batches(), STEPS)
    run = jaxmem.schedule(recipe.step, **DONATED)
    got, others = recipe.train(run, part, batches(), STEPS)
    assert losses[-1] != losses[0]
    np.testing.assert_allclose(others, losses, rtol=1e-5)
    for name, w in params["layers"].items():
        new = got["layers"][name]
        np.testing.assert_array_equal(new["base"]["qvalue"], w["base"]["qvalue"])
        np.testing.assert_array_equal(new["base"]["scale"], w["base"]["scale"])
        assert jnp.abs(new["lora_b"]).max() > 0


def test_no_dequantized_weight_is_kept(part):
    params, frozen = part
    arguments = params, recipe.TX.init(params), frozen, next(batches())
    run = jaxmem.schedule(recipe.step, **DONATED)
    weights = recipe.LAYERS * 2 * 4 * recipe.WIDTH**2 * 4  # bytes in float32
    shape = sorted((recipe.WIDTH, 4 * recipe.WIDTH))
    rows = [r for r in run.plan(*arguments).residuals if sorted(r.shape[1:]) == shape]
    assert sum(row.bytes for row in rows) == weights
    plain = jaxmem.estimate(jax.jit(recipe.step, **DONATED), *arguments)
    assert jaxmem.estimate(run, *arguments).temp_bytes < plain.temp_bytes - weights
