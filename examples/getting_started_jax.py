"""Getting started without a framework: measure a train step, shrink it, train with it.

    python examples/getting_started_jax.py         # compiled for this CPU
    python examples/getting_started_jax.py h100    # for an absent chip

Replace `loss_fn` with your loss, and `step` with your training step.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem

TARGET = sys.argv[1] if len(sys.argv) > 1 else "cpu"
LAYERS, WIDTH, BATCH = 8, 128, 256
optimizer = optax.adamw(1e-3)


def normalize(x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6)


def layer(x, params):
    hidden = jax.nn.gelu(normalize(x) @ params["up"])
    return x + hidden @ params["down"], None


def loss_fn(params, x, y):
    prediction, _ = jax.lax.scan(layer, x, params)  # all layers in one loop
    return jnp.mean((prediction - y) ** 2)


def make_step(loss_fn):
    def step(state, x, y):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def make_state():
    up, down = jax.random.split(jax.random.key(0))
    params = {
        "up": 0.05 * jax.random.normal(up, (LAYERS, WIDTH, 4 * WIDTH)),
        "down": 0.05 * jax.random.normal(down, (LAYERS, 4 * WIDTH, WIDTH)),
    }
    return params, optimizer.init(params)


def train(step):
    state, draw, losses = make_state(), np.random.default_rng(0), []
    for _ in range(5):
        x = draw.normal(size=(BATCH, WIDTH)).astype("float32")
        state, loss = step(state, x, x[:, ::-1])
        losses.append(float(loss))
    return losses


# 1. What does the step take, and does it fit? Nothing is run; shapes are enough.
step = make_step(loss_fn)
batch = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
arguments = jax.eval_shape(make_state), batch, batch
before = jaxmem.estimate(step, *arguments, target=TARGET, donate_argnums=0)
print(before)

# 2. The same loss with lean ops: their formulas are found in the function.
small_step = make_step(jaxmem.substitute(loss_fn))
after = jaxmem.estimate(small_step, *arguments, target=TARGET, donate_argnums=0)
print(f"temporaries: {before.temp_bytes:,} bytes -> {after.temp_bytes:,} bytes")

# 3. The same step, scheduled: gradients are used and freed layer by layer.
scheduled = jaxmem.schedule(small_step, donate_argnums=0)
print(scheduled.plan(*arguments))

# 4. Both train to the same losses, to rounding.
plain_losses = train(jax.jit(step, donate_argnums=0))
losses = train(scheduled)
print("losses, plain:    ", plain_losses)
print("losses, scheduled:", losses)
np.testing.assert_allclose(losses, plain_losses, rtol=1e-4)
