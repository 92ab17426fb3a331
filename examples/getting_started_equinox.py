"""Getting started with Equinox: measure a train step, shrink it, train with it.

    python examples/getting_started_equinox.py         # compiled for this CPU
    python examples/getting_started_equinox.py h100    # for an absent chip

Replace `Network` with your model, and `step` with your training step.
"""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem

TARGET = sys.argv[1] if len(sys.argv) > 1 else "cpu"
LAYERS, WIDTH, BATCH = 8, 128, 256
optimizer = optax.adamw(1e-3)


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        up, down = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=up)
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=down)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Network(eqx.Module):
    blocks: Block  # all layers in one: each array has an axis of layers

    def __init__(self, key):
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(key, LAYERS))

    def __call__(self, x):
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)
        layer = lambda x, block: (jax.vmap(eqx.combine(block, rest))(x), None)
        return jax.lax.scan(layer, x, arrays)[0]


def loss_fn(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def make_step(loss_fn):
    def step(model, opt_state, x, y):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, loss

    return step


def make_state():
    model = Network(jax.random.key(0))
    return model, optimizer.init(eqx.filter(model, eqx.is_array))


def train(step):
    (model, opt_state), draw, losses = make_state(), np.random.default_rng(0), []
    for _ in range(5):
        x = jnp.array(draw.normal(size=(BATCH, WIDTH)), jnp.float32)
        model, opt_state, loss = step(model, opt_state, x, x[:, ::-1])
        losses.append(float(loss))
    return losses


# 1. What does the step take, and does it fit? Nothing is run; shapes are enough.
step = make_step(loss_fn)
batch = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
arguments = *eqx.filter_eval_shape(make_state), batch, batch
donated = {"donate_argnums": (0, 1)}  # the model and the optimizer's state
before = jaxmem.estimate(step, *arguments, target=TARGET, **donated)
print(before)

# 2. The same loss with lean ops: their formulas are found in the function.
small_step = make_step(jaxmem.substitute(loss_fn))
after = jaxmem.estimate(small_step, *arguments, target=TARGET, **donated)
print(f"temporaries: {before.temp_bytes:,} bytes -> {after.temp_bytes:,} bytes")

# 3. The same step, scheduled: gradients are used and freed layer by layer.
scheduled = jaxmem.schedule(small_step, **donated)
print(scheduled.plan(*arguments))

# 4. Both train to the same losses, to rounding.
plain_losses = train(eqx.filter_jit(step))
losses = train(scheduled)
print("losses, plain:    ", plain_losses)
print("losses, scheduled:", losses)
np.testing.assert_allclose(losses, plain_losses, rtol=1e-4)
