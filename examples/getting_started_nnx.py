"""Getting started with Flax nnx: measure a train step, shrink it, train with it.

    python examples/getting_started_nnx.py         # compiled for this CPU
    python examples/getting_started_nnx.py h100    # for an absent chip

Replace `GPT` with your model, and `step` with your training step.
"""

import sys

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxmem

TARGET = sys.argv[1] if len(sys.argv) > 1 else "cpu"
LAYERS, WIDTH, HEADS, BATCH, LENGTH = 4, 64, 4, 8, 64


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm_1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm_1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.blocks = nnx.vmap(Block)(rngs.split(LAYERS))  # all layers in one
        self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, tokens):
        mask = nnx.make_causal_mask(tokens)

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run_layers(block, x):
            return block(x, mask)

        return self.head(run_layers(self.blocks, self.embed(tokens)))


def step(model, optimizer, tokens):
    def loss_fn(model):
        logits, labels = model(tokens[:, :-1]), tokens[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def make_optimizer(model):
    return nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def train(step, model):
    optimizer = make_optimizer(model)
    batches = np.random.default_rng(0).integers(0, 9, (5, BATCH, LENGTH + 1))
    return [float(step(model, optimizer, jnp.array(tokens))) for tokens in batches]


# 1. What does the step take, and does it fit? Nothing is run.
model = GPT(nnx.Rngs(0))
tokens = jnp.zeros((BATCH, LENGTH + 1), jnp.int32)
donated = {"donate_argnums": (0, 1)}  # the model and the optimizer are updated in place
before = jaxmem.estimate(
    step, model, make_optimizer(model), tokens, target=TARGET, **donated
)
print(before)

# 2. The same model with layers that save less for the backward pass.
small = jaxmem.substitute(model)
print(jaxmem.nn.report(small))
after = jaxmem.estimate(
    step, small, make_optimizer(small), tokens, target=TARGET, **donated
)
print(f"temporaries: {before.temp_bytes:,} bytes -> {after.temp_bytes:,} bytes")

# 3. The same step, scheduled: gradients are used and freed layer by layer.
scheduled = jaxmem.schedule(step, **donated)
print(scheduled.plan(small, make_optimizer(small), tokens))

# 4. Both train to the same losses, to rounding.
plain_losses = train(nnx.jit(step), GPT(nnx.Rngs(0)))
losses = train(scheduled, small)
print("losses, plain:    ", plain_losses)
print("losses, scheduled:", losses)
np.testing.assert_allclose(losses, plain_losses, rtol=1e-4)
