"""One array under two names, one of which is donated: an error that names both."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmem

X = jnp.ones((4, 16))


class Net(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(16, 16, rngs=nnx.Rngs(0))


def averaged(model, average, x):
    grads = nnx.grad(lambda model: jnp.mean(model.dense(x) ** 2))(model)
    new = lambda e, p, g: 0.9 * e + 0.1 * (p - 0.1 * g)
    states = nnx.state(average), nnx.state(model), grads
    nnx.update(average, jax.tree.map(new, *states))


def plain(params, average, x):
    grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(params)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return new, jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, average, new)


CALLS = {
    "estimate": lambda step, *args: jaxmem.estimate(step, *args, donate_argnums=(0, 1)),
    "schedule": lambda step, *args: jaxmem.schedule(step, donate_argnums=(0, 1))(*args),
    "plan": lambda step, *args: jaxmem.schedule(step, donate_argnums=1).plan(*args),
    "jitted": lambda step, *args: jaxmem.estimate(
        jax.jit(step, donate_argnums=0) if step is plain else step, *args
    ),
}


@pytest.mark.parametrize("call", [c for c in CALLS if c != "jitted"])
def test_an_average_made_by_clone(call):
    model = Net()
    both = r"model\.dense\.\w+ and average\.dense\.\w+ are one and the same array"
    with pytest.raises(ValueError, match=f"{both}.*average = jax.tree.map"):
        CALLS[call](averaged, model, nnx.clone(model), X)


@pytest.mark.parametrize("call", CALLS)
def test_of_plain_arrays(call):
    params = {"w": jnp.ones((16, 16))}
    both = r"params\['w'\] and average\['w'\] are one and the same array"
    with pytest.raises(ValueError, match=f"{both}.*average = jax.tree.map"):
        CALLS[call](plain, params, dict(params), X)


def test_what_the_message_says_helps():
    model = Net()
    average = nnx.clone(model)
    average = jax.tree.map(jnp.copy, average)
    jaxmem.schedule(averaged, donate_argnums=(0, 1))(model, average, X)


def test_of_a_step_over_micro_batches():
    params = {"w": jnp.ones((16, 16))}
    tx = optax.trace(0.9)
    loss = lambda params, batch, rng: jnp.mean((batch @ params["w"]) ** 2)
    state = tx.init(params)._replace(trace=params)
    with pytest.raises(ValueError, match=r"params\['w'\] and opt_state.trace\['w'\]"):
        jaxmem.microbatch(loss, tx, 2)(params, state, X, None)


def test_what_is_not_donated_may_be_the_same():
    params = {"w": jnp.ones((16, 16))}
    jaxmem.schedule(plain, donate_argnums=())(params, dict(params), X)
    # nor has a trace inside another function any buffers
    inner = jaxmem.schedule(plain, donate_argnums=(0, 1))
    jax.jit(lambda params: inner(params, dict(params), X))(params)
