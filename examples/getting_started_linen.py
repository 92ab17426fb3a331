"""Getting started with Flax linen: measure a train step, shrink it, train with it.

    python examples/getting_started_linen.py         # compiled for this CPU
    python examples/getting_started_linen.py h100    # for an absent chip

Replace `GPT` with your model, and `step` with your training step.
"""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jaxmem

TARGET = sys.argv[1] if len(sys.argv) > 1 else "cpu"
LAYERS, WIDTH, HEADS, BATCH, LENGTH = 4, 64, 4, 8, 64


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        attention = nn.MultiHeadDotProductAttention(num_heads=HEADS)
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(hidden), None


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        layers = nn.scan(  # all layers in one loop
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=LAYERS,
        )
        x = nn.Embed(256, WIDTH)(tokens)
        x, _ = layers(name="layers")(x, nn.make_causal_mask(tokens))
        return nn.Dense(256)(x)


def step(state, tokens):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        labels = tokens[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def make_state(model):
    params = model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))


def train(step, model):
    state, losses = jax.jit(make_state, static_argnums=0)(model), []
    for tokens in np.random.default_rng(0).integers(0, 9, (5, BATCH, LENGTH + 1)):
        state, loss = step(state, jnp.array(tokens, jnp.int32))
        losses.append(float(loss))
    return losses


def arguments(model):
    """Shapes are enough: no parameter is allocated to measure a step."""
    state = jax.eval_shape(lambda: make_state(model))
    return state, jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)


# 1. What does the step take, and does it fit? Nothing is run.
model = GPT()
before = jaxmem.estimate(step, *arguments(model), target=TARGET, donate_argnums=0)
print(before)

# 2. The same model with layers that save less for the backward pass.
small = jaxmem.substitute(model)
after = jaxmem.estimate(step, *arguments(small), target=TARGET, donate_argnums=0)
print(f"temporaries: {before.temp_bytes:,} bytes -> {after.temp_bytes:,} bytes")

# 3. The same step, scheduled: gradients are used and freed layer by layer.
scheduled = jaxmem.schedule(step, donate_argnums=0)
print(scheduled.plan(*arguments(small)))

# 4. Both train to the same losses, to rounding.
plain_losses = train(jax.jit(step, donate_argnums=0), model)
losses = train(scheduled, small)
print("losses, plain:    ", plain_losses)
print("losses, scheduled:", losses)
np.testing.assert_allclose(losses, plain_losses, rtol=1e-4)
