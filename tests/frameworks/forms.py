"""One small net and its train step, in each form that users write it.

A form gives a step, fresh arguments for it, and how to call it: `losses` runs any
function that behaves like the step and returns the loss of each call.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

from tests.arrays import array

D, ROWS, LR = 8, 16, 3e-2
X = array(np.random.default_rng(0).normal(size=(ROWS, D)), jnp.float32)
TX = optax.adam(LR)


class Form(NamedTuple):
    """A step as users of a framework write it.

    Attributes:
      step: the step itself.
      make: its arguments, new ones at each call.
      follow: (arguments, result) -> (loss, arguments of the next call).
      loss: a loss of the first argument and the batch, for `microbatch`.
      jitted: the step compiled as its framework does it.
    """

    step: Callable
    make: Callable[[], tuple]
    follow: Callable[[tuple, Any], tuple[Any, tuple]]
    loss: Callable
    jitted: Callable


def losses(run: Callable, form: Form, steps: int = 3) -> list[float]:
    """The losses of some calls, from fresh arguments."""
    args, found = form.make(), []
    for _ in range(steps):
        value, args = form.follow(args, run(*args))
        found.append(float(value))
    return found


def mean_square(x):
    return jnp.mean((x - 1.0) ** 2)


# -- plain pytrees


def plain_loss(params, x, rng=None):
    for w in params:
        x = x + jnp.tanh(x @ w)
    return mean_square(x)


def plain_step(params, state, x):
    loss, grads = jax.value_and_grad(plain_loss)(params, x)
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def plain_args():
    rng = np.random.default_rng(1)
    params = [array(rng.normal(size=(D, D)) / D, jnp.float32) for _ in range(2)]
    return params, TX.init(params), X


def functional(args, out):
    """The state is returned, in the order of the arguments, with the loss behind."""
    return out[-1], (*out[:-1], *args[len(out) - 1 :])


# -- Flax linen


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = x + jnp.tanh(nn.Dense(D)(x))
        return x


LINEN = Linen()


def linen_loss(params, x, rng=None):
    return mean_square(LINEN.apply({"params": params}, x))


@jax.jit
def linen_step(state, x):
    loss, grads = jax.value_and_grad(linen_loss)(state.params, x)
    return state.apply_gradients(grads=grads), loss


def linen_args():
    params = LINEN.init(jax.random.key(0), X)["params"]
    return TrainState.create(apply_fn=LINEN.apply, params=params, tx=TX), X


# -- Flax nnx


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


def nnx_loss(model, x, rng=None):
    return mean_square(model(x))


def nnx_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(nnx_loss)(model, x)
    optimizer.update(model, grads)
    return loss


def nnx_args():
    model = Nnx(nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param), X


def in_place(args, out):
    return out, args


# -- Equinox


class Eqx(eqx.Module):
    layers: list
    activation: object
    dropout: eqx.nn.Dropout  # its rate and its flag are leaves that are no arrays

    def __init__(self, key):
        keys = jax.random.split(key, 2)
        self.layers = [eqx.nn.Linear(D, D, key=k) for k in keys]
        self.activation = jnp.tanh
        self.dropout = eqx.nn.Dropout(0.5, inference=True)

    def __call__(self, x):
        for layer in self.layers:
            x = x + self.dropout(self.activation(jax.vmap(layer)(x)))
        return x


def eqx_loss(model, x, rng=None):
    return mean_square(model(x))


def eqx_step(model, state, x):
    loss, grads = eqx.filter_value_and_grad(eqx_loss)(model, x)
    updates, state = TX.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss


def eqx_args():
    model = Eqx(jax.random.key(0))
    return model, TX.init(eqx.filter(model, eqx.is_inexact_array)), X


JIT, NNX_JIT, EQX_JIT = jax.jit(plain_step), nnx.jit(nnx_step), eqx.filter_jit(eqx_step)
TREE_JIT = nnx.jit(nnx_step, graph=False)
PLAIN = Form(plain_step, plain_args, functional, plain_loss, JIT)
LINEN_STATE = Form(linen_step, linen_args, functional, linen_loss, linen_step)
NNX = Form(nnx_step, nnx_args, in_place, nnx_loss, NNX_JIT)
EQX = Form(eqx_step, eqx_args, functional, eqx_loss, EQX_JIT)
FORMS = {
    "plain": PLAIN,
    "linen": LINEN_STATE,
    "nnx": NNX,
    "nnx.jit": NNX._replace(step=NNX_JIT),
    "equinox.filter_jit": EQX._replace(step=EQX_JIT),
    # the same with what differs less from another
    "jit": PLAIN._replace(step=JIT),
    "nnx.jit, tree mode": NNX._replace(step=TREE_JIT, jitted=TREE_JIT),
    "equinox": EQX,
}
MAIN = list(FORMS)[:5]
