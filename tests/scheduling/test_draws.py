"""Masks of dropout, drawn a second time on a TPU: once a layer, and in time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmem
from benchmarks.frontier import MODELS
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.scans import is_mask
from jaxmem.scheduling import schedule
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling.recompute.front import pareto_front
from jaxmem.scheduling.recompute.pairs import cut
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.recompute.space import scans_in, space_of

LAYERS, ROWS, WIDTH = 4, 64, 128


def dropped(key, x):
    kept = jax.random.bernoulli(key, 0.9, x.shape)
    return jnp.where(kept, x / 0.9, 0)


def loss(weights, x, key):
    """The mask is read twice in the backward pass: by both gradients."""

    def layer(x, item):
        w, key = item
        y = dropped(key, jnp.tanh(x @ w))
        return x + y @ w.T, None

    keys = jax.random.split(key, LAYERS)
    return jnp.sum(lax.scan(layer, x, (weights, keys))[0] ** 2)


def arguments(rows=ROWS):
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((LAYERS, WIDTH, WIDTH)).astype(np.float32) / WIDTH
    x = rng.standard_normal((rows, WIDTH)).astype(np.float32)
    return jnp.asarray(weights), jnp.asarray(x), jax.random.key(0)


def rewritten(target: str, draws: bool = False):
    """The gradient with everything recomputed."""
    closed = jax.make_jaxpr(jax.grad(loss))(*arguments())
    choice = Choice(target).having(Recompute(1e-3, draws=draws))
    return rewrite(closed, {}, None, choice).jaxpr


def barriers(closed) -> list[str]:
    """The types of what is behind barriers in scans."""
    inside = (
        e
        for scan in jaxprs.walk(closed)
        if primitives.is_scan(scan)
        for e in jaxprs.walk(jaxprs.bodies(scan)[0])
    )
    return [e.outvars[0].aval.str_short() for e in inside if primitives.is_barrier(e)]


def test_a_mask_is_an_array_of_its_own_on_a_tpu():
    mask = f"bool[{ROWS},{WIDTH}]"
    assert barriers(rewritten("tpu-v5e")) == [mask]
    assert barriers(rewritten("tpu-v5e", draws=True)) == []
    assert barriers(rewritten("h100")) == []


@pytest.mark.parametrize("target", ["tpu-v5e", "h100"])
@pytest.mark.parametrize("draws", [False, True])
def test_values(target, draws):
    closed = rewritten(target, draws)
    args = arguments()
    (found,) = jax.jit(functools.partial(jaxprs.evaluate, closed))(list(args))
    wanted = jax.grad(loss)(*args)
    # the same operations in the same order
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_masks_are_not_packed_into_bits_where_that_takes_longer():
    """On a TPU it takes longer than to draw them once more; a GPU fuses it."""
    closed, kept = jax.make_jaxpr(jax.grad(loss))(*arguments(4096)), {}
    for target in ("tpu-v5e", "h100"):
        first = rewrite(closed, {}, None, Choice(target))
        space = space_of(scans_in(first), (), target)
        front = [one.choice.get(Recompute) for one in pareto_front(space)]
        cuts = [cut(*space.scans, one.price(target)) for one in front]
        kept[target] = any(is_mask(v) for found in cuts for v in found.variables)
        assert front[-1].draws == (target == "tpu-v5e")  # at last no array of it
    assert kept == {"tpu-v5e": False, "h100": True}


@pytest.mark.slow
@pytest.mark.usefixtures("standard_jax")
def test_attention_with_dropout_takes_less_time():
    """GPT-2's layers on a TPU, everything recomputed."""
    step, args = MODELS["GPT-2 medium, 4 x 1024"].under("plain")
    plan = schedule(step, target="tpu-v5e", donate_argnums=()).plan(*args)

    def seconds(draws: bool) -> float:
        choice = Choice("tpu-v5e").having(Recompute(1e-3, draws=draws))
        other = dataclasses.replace(plan, choice=choice)
        scheduled = schedule(step, plan=other, donate_argnums=())
        return jaxmem.estimate(scheduled, *args, target="tpu-v5e").seconds

    assert seconds(False) < 0.9 * seconds(True)
