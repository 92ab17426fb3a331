"""A wrapper is asked for its own options once, with the arguments of the user."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxmem
from jaxmem.frameworks import Jitted


class Wrapper:
    """A step of nnx objects that tells its options, as our own wrappers do."""

    def __init__(self):
        self.asked = []

    def __call__(self, model, x):
        def loss(model):
            return (model(x) ** 2).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        state = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads)
        nnx.update(model, state)
        return value

    def jit_options(self, *args, **kwargs):
        self.asked.append((args, kwargs))
        return Jitted(donated=(0,))


@pytest.mark.parametrize("caller", ["call", "estimate"])
def test_a_wrapper_is_asked_once_a_call(caller):
    step, model, x = Wrapper(), nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4))
    if caller == "call":
        jaxmem.schedule(step)(model, x)
    else:
        jaxmem.estimate(step, model, x)
    assert len(step.asked) == 1
    args, kwargs = step.asked[0]
    assert args[0] is model and args[1] is x and kwargs == {}
