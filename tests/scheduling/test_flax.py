"""Layers scanned by flax: linen's nn.scan, and an nnx model split and merged."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from tests.scheduling.problem import D, L, array, bytes_of, checked, whys
from tests.sets import some_fast

pytestmark = pytest.mark.usefixtures("standard_promotion")

TX = optax.adamw(1e-2)
X = array(4, D, seed=4, dtype=jnp.float32)
# float32 gradients, off by 1e-6 of themselves, through adam's division: an update of
# 1e-2 that is off by as much, of parameters of order 1
RTOL = 1e-5


def filled(shapes):
    """Arrays of these shapes, all positive: second moments are among them."""
    make = lambda s: jnp.abs(array(*s.shape, scale=0.1)).astype(s.dtype)
    return jax.tree.map(make, shapes)


class Block(nn.Module):
    """A residual layer with a norm and a dropout, as in a transformer."""

    @nn.compact
    def __call__(self, x, _):
        h = nn.Dense(2 * D)(nn.LayerNorm()(x))
        h = nn.Dropout(0.1, deterministic=False)(nn.gelu(h))
        return x + nn.Dense(D)(h), None


class Model(nn.Module):
    """Scanned blocks, with remat or without."""

    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=L,
        )
        x, _ = layers(name="layers")(x, None)
        return nn.Dense(3)(x)


@pytest.mark.parametrize("remat", some_fast([False, True], True))
def test_linen(remat):
    model = Model(remat)
    key = jax.random.key(0)
    init = lambda: model.init({"params": key, "dropout": key}, X)["params"]
    params = filled(jax.eval_shape(init))

    def step(params, state, x, key):
        def loss(params):
            out = model.apply({"params": params}, x, rngs={"dropout": key})
            return jnp.mean((out - 1) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    args = params, TX.init(params), X, key
    plan = checked(step, *args, rtol=RTOL)
    assert plan.kept_bytes == 0, whys(plan)
    assert plan.released_bytes == bytes_of(params["layers"])
    assert any("Dense_0" in g.path for g in plan.gradients), plan


class Layer(nnx.Module):
    """The same in nnx."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.up = nnx.Linear(D, 2 * D, rngs=rngs)
        self.down = nnx.Linear(2 * D, D, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Stack(nnx.Module):
    """Layers made by nnx.vmap and run by nnx.scan."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=L)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Layer(rngs)

        self.layers = make(rngs)
        self.head = nnx.Linear(D, 3, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x)

        return self.head(run(x, self.layers))


def test_nnx():
    """A pure step over the split state."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Stack(nnx.Rngs(0))))
    params = filled(shapes)

    def step(params, state, x):
        def loss(params):
            return jnp.mean((nnx.merge(graph, params)(x) - 1) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    args = params, TX.init(params), X
    plan = checked(step, *args, rtol=RTOL)
    assert plan.kept_bytes == 0, whys(plan)
    assert plan.released_bytes == bytes_of(params["layers"])


@pytest.mark.slow
def test_nnx_optimizer_inside_the_step():
    """Model and optimizer as one graph: what nnx.jit would do, written out."""

    def make():
        model = Stack(nnx.Rngs(0))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(make)
    graph, shapes = nnx.split((model, optimizer))
    state = filled(shapes)

    def step(state, x):
        model, optimizer = nnx.merge(graph, state)
        loss = lambda model: jnp.mean((model(x) - 1) ** 2)
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    plan = checked(step, state, X, donate=(0,), rtol=RTOL)
    assert plan.kept_bytes == 0, whys(plan)
    assert plan.released_bytes == bytes_of(nnx.state(model.layers, nnx.Param))
