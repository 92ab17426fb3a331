"""Scans that stack what they read."""

import jax
import jax.numpy as jnp
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


def test_a_training_step_is_none():
    def loss(ws, x):
        return jnp.mean(
            over(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)))(ws, x)[0]
        )

    assert not jaxmem.lint(jax.grad(loss), WS, X).of(CHECK)
