"""Scans that stack what they read."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmem

CHECK = "stacked as read"
LAYERS, WIDTH = 4, 32
WS = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
X = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)


def over(body):
    return lambda ws, x: jax.lax.scan(body, x, ws)


def returning(*outputs):
    """A checkpointed layer that returns these functions of its weights."""
    return jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), tuple(f(w) for f in outputs)))


def test_weights_that_a_checkpointed_layer_returns():
    (found,) = jaxmem.lint(over(returning(lambda w: w)), WS, X).of(CHECK)
    assert found.bytes == 4 * WS.size
    assert f"float32[{LAYERS},{WIDTH},{WIDTH}]" in found.what
    assert "test_stacked_as_read.py" in found.where
    assert "nnx.Not(nnx.Param)" in found.remedy


def test_a_constant_of_the_body_is_stacked_as_often_as_it_runs():
    def fn(ws, x):
        body = jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), x.reshape(WIDTH, -1)))
        return jax.lax.scan(body, x, ws)

    (found,) = jaxmem.lint(fn, WS, X).of(CHECK)
    assert found.bytes == 4 * LAYERS * X.size


@pytest.mark.parametrize("output", [lambda w: 2 * w, lambda w: w.sum(0)])
def test_what_is_changed_is_no_finding(output):
    assert not jaxmem.lint(over(returning(output)), WS, X).of(CHECK)


def test_what_jax_hands_on_is_no_finding():
    """Without a checkpoint it sees that the output is the input."""
    body = lambda x, w: (jnp.tanh(x @ w), w)
    assert not jaxmem.lint(over(body), WS, X).of(CHECK)


def test_the_state_of_an_nnx_layer():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.dense(x))

    make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(lambda rngs: Layer(rngs)))
    graph, state = nnx.split(make(nnx.Rngs(0)))

    def apply(keep):
        def body(x, state):
            layer = nnx.merge(graph, state)
            return layer(x), nnx.state(layer, keep)

        return lambda state, x: jax.lax.scan(jax.checkpoint(body), x, state)

    x = jnp.ones((8, WIDTH))
    (found,) = jaxmem.lint(apply(nnx.Param), state, x).of(CHECK)
    assert found.bytes == 4 * WS.size  # the biases are under a kibibyte
    assert not jaxmem.lint(apply(nnx.Not(nnx.Param)), state, x).of(CHECK)


class Remat(nnx.Module):
    """Checkpointed layers in `nnx.scan`, the stack of flax's issue 5116."""

    def __init__(self, updates):
        make = lambda rngs: nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.layers = nnx.vmap(make)(nnx.Rngs(0).split(LAYERS))
        self.updates = updates

    def __call__(self, x):
        how = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry}
        layer = nnx.remat(lambda layer, x: jnp.tanh(layer(x)), **self.updates)
        return nnx.scan(layer, **how)(self.layers, x)


def nnx_step(model, optimizer, x):
    grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, grads)


def jax_step(model, optimizer, x):
    graph, params = nnx.split(model)
    loss = lambda params: jnp.mean(nnx.merge(graph, params)(x) ** 2)
    optimizer.update(model, jax.grad(loss)(params))


def remat_args(updates=None):
    model = Remat(updates or {})
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), X


def test_checkpointed_layers_in_nnx_scan_under_nnx_grad():
    """The optimizer reads the stack that the forward scan has returned."""
    lint = partial(jaxmem.lint, donate_argnums=(0, 1))
    (found,) = lint(nnx_step, *remat_args()).of(CHECK)
    assert found.bytes == 4 * WS.size
    # as the remedy says: no state is returned, or none is used
    assert "graph_updates=False" in found.remedy
    assert not lint(nnx_step, *remat_args({"graph_updates": False})).of(CHECK)
    assert not lint(jax_step, *remat_args()).of(CHECK)
    scheduled = jaxmem.schedule(nnx_step, donate_argnums=(0, 1))
    assert not lint(scheduled, *remat_args()).of(CHECK)


@pytest.mark.slow
def test_bytes_of_nnx_grad_on_a_gpu(monkeypatch):
    """jax.grad's, and one more stack of parameters, which `schedule` takes away."""
    monkeypatch.setitem(globals(), "WIDTH", 512)
    args = remat_args()
    args = *args[:2], jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    how = {"target": "h100", "donate_argnums": (0, 1)}
    plain = jaxmem.estimate(jax_step, *args, **how)
    held = jaxmem.estimate(nnx_step, *args, **how)
    stack = 4 * LAYERS * WIDTH**2
    assert held.peak_bytes == pytest.approx(plain.peak_bytes + stack, rel=0.01)
    plans = [
        jaxmem.schedule(step, progress=False, **how).plan(*args)
        for step in (nnx_step, jax_step)
    ]
    # counters of the optimizer differ by some bytes
    peaks = [plan.scheduled.peak_bytes for plan in plans]
    assert peaks[0] <= peaks[1] + 1024 and peaks[0] <= plain.peak_bytes
    assert "that scans stack as they have read it" in str(plans[0])


def test_a_training_step_is_none():
    def loss(ws, x):
        return jnp.mean(
            over(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)))(ws, x)[0]
        )

    assert not jaxmem.lint(jax.grad(loss), WS, X).of(CHECK)
