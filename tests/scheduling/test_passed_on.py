"""Outputs of scans that are slices of what these read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmem.ir import jaxprs
from jaxmem.ir.scans import ys_of
from jaxmem.scheduling._passes import rewrite
from tests.scheduling.problem import array
from tests.scheduling.test_scan_residuals import scans

L, D = 3, 8
WS, VS, X = array(L, D, D, seed=1), array(L, D, D, seed=2), array(4, D, seed=3)


def layers(body, **how):
    """A scan over checkpointed layers, with what they return."""
    return lambda ws, vs, x: lax.scan(jax.checkpoint(body), x, (ws, vs), **how)


def stacks(fn):
    """(arrays that the scan of a function stacks, after the passes; its results)."""
    closed = jax.make_jaxpr(fn)(WS, VS, X)
    flat = rewrite(closed, {}).jaxpr
    got = jaxprs.evaluate(flat, [WS, VS, X])
    for a, b in zip(got, jax.tree.leaves(fn(WS, VS, X)), strict=True):
        np.testing.assert_array_equal(a, b)
    (loop,) = scans(flat)
    return len(ys_of(loop))


run = lambda x, w, v: jnp.tanh(x @ w) @ v


@pytest.mark.parametrize("reverse", [False, True])
def test_slices_that_a_checkpointed_layer_returns(reverse):
    """Also in another order, one of them twice."""
    body = lambda x, wv: (run(x, *wv), (wv[1], wv[0], wv[1]))
    assert stacks(layers(body, reverse=reverse)) == 0


def test_checkpoints_in_checkpoints():
    inner = jax.checkpoint(lambda x, w, v: (run(x, w, v), w))

    def body(x, wv):
        x, w = inner(x, *wv)
        return x, (w, wv[1])

    assert stacks(layers(body)) == 0


def test_what_is_changed_or_carried_is_stacked():
    body = lambda x, wv: (run(x, *wv), (2 * wv[0], x, wv[1], wv[0].T))
    assert stacks(layers(body)) == 3


def test_a_gradient_that_is_taken_of_them():
    """The forward pass of `nnx.grad`: the optimizer updates what the scan returned."""
    body = lambda x, wv: (run(x, *wv), wv)

    def step(ws, vs, x):
        def loss(ws, vs):
            x_out, stack = layers(body)(ws, vs, x)
            return jnp.sum(x_out**2), stack

        grads, stack = jax.grad(loss, (0, 1), has_aux=True)(ws, vs)
        return jax.tree.map(lambda p, g: p - 0.1 * g, stack, grads)

    closed = jax.make_jaxpr(step)(WS, VS, X)
    forward = lambda closed: next(e for e in scans(closed) if not e.params["reverse"])
    flat = rewrite(closed, {0: 0, 1: 1}).jaxpr
    shapes = lambda closed: [v.aval.shape for v in ys_of(forward(closed))]
    assert shapes(closed).count((L, D, D)) == 2
    assert shapes(flat) == [(L, *X.shape)]
    got = jaxprs.evaluate(flat, [WS, VS, X])
    # sums over rows in another order, of some tens of float32
    for a, b in zip(got, step(WS, VS, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
