"""An nnx model whose layers are stacked and scanned, with its step."""

import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tests.frameworks.forms import D, X, mean_square


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(D, 4 * D, rngs=rngs)
        self.down = nnx.Linear(4 * D, D, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(checkpoint_name(self.up(x), "up")))


class Stack(nnx.Module):
    """Layers made by nnx.vmap and run by nnx.scan."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Layer(rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x)

        return run(x, self.layers)


def stack_args():
    model = Stack(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), X


def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: mean_square(model(x)))(model)
    optimizer.update(model, grads)
    return loss
