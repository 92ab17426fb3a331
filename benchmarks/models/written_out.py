"""A GPT in nnx whose layers are written out one after the other, as nnx users have it.

Heads share keys and values by fours, positions are learned, the head is the embedding.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

VOCABULARY, WIDTH, HEADS, HIDDEN = 8192, 512, 8, 2048
TOKENS = jax.ShapeDtypeStruct((16, 513), jnp.int32)  # and the one to be predicted
BF16 = {"dtype": jnp.bfloat16}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        size, heads = WIDTH // HEADS, (HEADS, HEADS // 4, HEADS // 4)
        self.shapes = [(count, size) for count in heads]
        linear = lambda n, m: nnx.Linear(n, m, use_bias=False, rngs=rngs, **BF16)
        self.qkv = nnx.List([linear(WIDTH, count * size) for count in heads])
        self.out = linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        y = self.norms[0](x)
        parts = zip(self.qkv, self.shapes, strict=True)
        qkv = [linear(y).reshape(*y.shape[:2], *shape) for linear, shape in parts]
        mixed = jax.nn.dot_product_attention(*qkv, is_causal=True)
        x = x + self.drop(self.out(mixed.reshape(x.shape)))
        return x + self.drop(self.down(nnx.silu(self.up(self.norms[1](x)))))


class GPT(nnx.Module):
    """`policy`: of `jax.checkpoint` round each layer; without one, nothing is."""

    def __init__(self, layers: int, rngs: nnx.Rngs, policy: Any = None):
        self.policy = policy
        self.words = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs, **BF16)
        self.positions = nnx.Embed(TOKENS.shape[1], WIDTH, rngs=rngs, **BF16)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.words(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = self.run(block, x)
        return self.words.attend(self.norm(x))

    def run(self, block: Block, x):
        if self.policy is None:
            return block(x)
        return nnx.remat(Block.__call__, policy=self.policy)(block, x)


def train_step(model: GPT, optimizer: nnx.Optimizer, tokens):
    """A step of AdamW with gradients clipped by their norm; gives the loss."""

    def loss_fn(model):
        logits = model(tokens[:, :-1]).astype(jnp.float32)
        of = optax.softmax_cross_entropy_with_integer_labels
        return of(logits, tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def training(layers: int, policy: Any = None):
    """The step, and its arguments; `policy`: as for `GPT`."""
    model = GPT(layers, nnx.Rngs(0), policy)
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    optimizer = nnx.Optimizer(model, rule, wrt=nnx.Param)
    return train_step, (model, optimizer, TOKENS)
