"""Bytes: no gradient accumulator with AdamA, and one with anything else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.accumulate import microbatch
from jaxmem.optim import adama

LAYERS, WIDTH, BATCH, N = 8, 256, 64, 8
SDS = jax.ShapeDtypeStruct
PARAMS = {
    "up": SDS((LAYERS, WIDTH, 2 * WIDTH), jnp.float32),
    "down": SDS((LAYERS, 2 * WIDTH, WIDTH), jnp.float32),
}
TREE = sum(x.size * 4 for x in PARAMS.values())  # 8 MiB


def loss(params, batch, rng):
    """A scanned stack of layers, each recomputed in the backward pass."""

    @jax.checkpoint
    def layer(x, w):
        return x + jax.nn.relu(x @ w["up"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)


def by_hand(tx):
    """Gradient accumulation as people write it."""

    def step(params, opt_state, batch, rng):
        def body(total, x):
            value, grads = jax.value_and_grad(loss)(params, x, None)
            return jax.tree.map(lambda t, g: t + g / N, total, grads), value

        batches = batch.reshape(BATCH // N, N, WIDTH).swapaxes(0, 1)
        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, losses = jax.lax.scan(body, zeros, batches)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, losses.mean()

    return step


def temp_bytes(step, tx, **options):
    args = PARAMS, jax.eval_shape(tx.init, PARAMS), SDS((BATCH, WIDTH), jnp.float32)
    report = jaxmem.estimate(step, *args, None, target="cpu", **options)
    # parameters and both moments are updated where they are
    assert report.alias_bytes >= 3 * TREE
    return report.temp_bytes


HAND = functools.partial(temp_bytes, by_hand(optax.adam(1e-3)), optax.adam(1e-3))


def test_adama_takes_two_parameter_trees_less_than_accumulation():
    """By hand there are the sum and a micro-batch's gradient; here one layer's."""
    plain = HAND(donate_argnums=(0, 1))
    assert plain > 2 * TREE
    tx = adama(1e-3)
    assert temp_bytes(microbatch(loss, tx, N), tx) < plain - 1.75 * TREE


def test_any_other_optimizer_takes_one_less():
    """The sum alone, into which each layer's gradient goes as soon as it exists."""
    tx = optax.adam(1e-3)
    plain = HAND(donate_argnums=(0, 1))
    assert temp_bytes(microbatch(loss, tx, N), tx) < plain - 0.75 * TREE


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), adama(1e-3))


@pytest.mark.fast("loss", "gradients-two_pass", "clip-two_pass")
@pytest.mark.parametrize(
    ("tx", "options", "trees"),
    [
        (adama(1e-3), {"skip_nonfinite": "loss"}, 0.5),
        (adama(1e-3), {"skip_nonfinite": "gradients"}, 1.5),
        (adama(1e-3), {"skip_nonfinite": "gradients", "clip": "two_pass"}, 0.5),
        (CLIPPED, {"clip": "two_pass"}, 0.75),
    ],
    ids=["loss", "gradients", "gradients-two_pass", "clip-two_pass"],
)
def test_what_waits_for_all_gradients_keeps_them_or_computes_them_twice(
    tx, options, trees
):
    step = microbatch(loss, tx, N, **options)
    assert temp_bytes(step, tx) < trees * TREE


@pytest.mark.slow
def test_gradients_computed_twice_are_the_same():
    key = jax.random.key(0)
    params = jax.tree.map(lambda s: 0.05 * jax.random.normal(key, s.shape), PARAMS)
    batch = jax.random.normal(key, (BATCH, WIDTH))
    once, twice = (
        microbatch(loss, CLIPPED, N, clip=clip, donate=False)(
            params, CLIPPED.init(params), batch, None
        )
        for clip in (None, "two_pass")
    )
    # the norm is a sum of 2**21 squares in another order: at worst a relative
    # 2**-24 for each of its 21 levels, twice that in the squares of nu; gradients
    # that cancel are told apart by the size of the largest
    for a, b in zip(jax.tree.leaves(once[1]), jax.tree.leaves(twice[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=64 * 2**-24 * np.abs(a).max())
