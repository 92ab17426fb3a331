"""Recomputation of written-out layers that waits for the gradient it is for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import ops
from jaxmem.ir import jaxprs, primitives
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling.recompute.barriers import Barriers
from tests.arrays import array

LAYERS, WIDTH, ROWS = 6, 1024, 64
NARROW = jnp.bfloat16
WAITING = Choice("h100", (Barriers(enabled=True),))


def lean_layer(x, w):
    return ops.gelu(ops.dense(x, w, dtype=NARROW))


def plain_layer(x, w):
    return jnp.tanh(x @ w.astype(NARROW))


def gradient_of(layer):
    """Of the loss of layers that are written out, by their weights."""

    def loss(weights, x):
        for w in weights:
            x = layer(x, w)
        return jnp.sum(x.astype(jnp.float32))

    return jax.grad(loss)


def arguments():
    rng = np.random.default_rng(0)
    draw = lambda *shape: array(rng.standard_normal(shape), jnp.float32)
    weights = [draw(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS)]
    return weights, draw(ROWS, WIDTH).astype(NARROW)


def is_held(eqn) -> bool:
    checkpoint = primitives.is_remat(eqn)
    return checkpoint and eqn.params["differentiated"] and eqn.params["prevent_cse"]


def rewritten(layer, choice=WAITING):
    fn, args = gradient_of(layer), arguments()
    closed = jax.make_jaxpr(fn)(*args)
    found = rewrite(closed, {}, choice=choice)
    got = jax.jit(lambda *leaves: jaxprs.evaluate(found.jaxpr, leaves))
    leaves = jax.tree.leaves(args)
    for a, b in zip(got(*leaves), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        # the same operations, in other fusions: a rounding of the narrow dtype each
        allowed = 8 * float(jnp.finfo(NARROW).eps) * float(jnp.max(jnp.abs(b)))
        np.testing.assert_allclose(a, b, rtol=0, atol=allowed)
    return found


def test_checkpoints_of_lean_ops_wait():
    """Products whose weight is read for x, so not the first; only where asked for."""
    found = rewritten(lean_layer)
    held = [eqn for eqn in jaxprs.walk(found.jaxpr) if is_held(eqn)]
    assert len(held) == LAYERS - 1
    assert found.did(Barriers)
    left = rewritten(lean_layer, Choice("h100"))
    assert not any(map(is_held, jaxprs.walk(left.jaxpr)))
    assert not left.did(Barriers)


def test_casts_of_a_plain_model_are_made_in_each_pass():
    """All but the first layer's, whose weight the backward pass does not read."""
    found = rewritten(plain_layer)
    casts = [
        eqn
        for eqn in jaxprs.walk(found.jaxpr)
        if eqn.primitive.name == "convert_element_type"
        and eqn.outvars[0].aval.shape == (WIDTH, WIDTH)
        and eqn.outvars[0].aval.dtype == NARROW
    ]
    assert len(casts) == LAYERS + LAYERS - 1
    assert "10.0 MiB of casts of weights are made in each pass, and not kept" in (
        found.notes
    )


def test_scanned_layers_have_no_use_for_them():
    def loss(weights, x):
        body = lambda x, w: (lean_layer(x, w), None)
        return jnp.sum(jax.lax.scan(body, x, weights)[0].astype(jnp.float32))

    weights, x = arguments()
    closed = jax.make_jaxpr(jax.grad(loss))(jnp.stack(weights), x)
    assert not rewrite(closed, {}, choice=WAITING).did(Barriers)


@pytest.mark.parametrize("layer", [lean_layer, plain_layer])
def test_no_narrow_copy_of_a_weight_is_kept(layer):
    """Compiled for a GPU: all copies but that of the layer at hand are saved.

    The first layer has none. Activations that wait in their place take less than one.
    Without a budget that is not taken, since so small a step takes longer by as much.
    """
    fn, args = gradient_of(layer), arguments()
    plain = jaxmem.estimate(jax.jit(fn), *args, target="h100")
    plan = jaxmem.schedule(fn, target="h100", donate_argnums=()).plan(*args)
    assert plan.scheduled.peak_bytes <= plain.peak_bytes
    saved = plain.peak_bytes - min(one.peak for one in plan.tried)
    size = NARROW.dtype.itemsize
    assert saved > (LAYERS - 3) * WIDTH * WIDTH * size


@pytest.mark.slow
def test_a_budget_recomputes_besides():
    """The plan has both, and its step the gradients of the plain one.

    What a plan repeats is counted in the step as the barriers leave it: the prediction
    of the same operations in the step without them would be of another program.
    """
    fn, args = gradient_of(lean_layer), arguments()
    free = jaxmem.schedule(fn, target="h100", donate_argnums=()).plan(*args)
    fixed = free.scheduled.argument_bytes + free.scheduled.output_bytes
    least = min(one.peak for one in free.tried)
    budget = fixed + int(0.8 * (least - fixed))
    step = jaxmem.schedule(fn, budget, target="h100", donate_argnums=())
    plan = step.plan(*args)
    assert plan.scheduled.peak_bytes <= budget
    compiled = [one for one in plan.tried if one.predicted is not None]
    assert compiled
    for one in compiled:
        assert abs(one.peak - one.predicted) < 0.1 * one.peak
    want, got = jax.jit(fn)(*args), step(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        allowed = 8 * float(jnp.finfo(NARROW).eps) * float(jnp.max(jnp.abs(b)))
        np.testing.assert_allclose(a, b, rtol=0, atol=allowed)
