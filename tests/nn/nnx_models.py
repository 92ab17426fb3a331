"""The nnx references: layers in a list, or stacked by nnx.vmap and run by nnx.scan."""

import jax
from flax import nnx


class Block(nnx.Module):
    """Pre-LN layer with attention, dropout and a bare gelu."""

    def __init__(self, width, rngs, dropout=0.0):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            2, width, decode=False, dropout_rate=dropout, deterministic=False, rngs=rngs
        )
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), is_causal=True)
        h = self.down(nnx.gelu(self.up(self.norm2(x))))
        return x + self.dropout(h)


class Loop(nnx.Module):
    """Layers in a list; the first and last norm are one shared module."""

    def __init__(self, width=16, layers=2, vocab=11, *, rngs, dropout=0.0):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.last = self.norm
        self.stats = nnx.BatchNorm(width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs, dropout) for _ in range(layers)])
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens):
        x = self.stats(self.norm(self.embed(tokens)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


class Stack(nnx.Module):
    """Layers created by nnx.vmap and run by nnx.scan, each under nnx.remat."""

    def __init__(self, width=16, layers=3, vocab=11, *, rngs, remat=False):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.head = nnx.Linear(width, vocab, rngs=rngs)
        self.remat = remat

        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Block(width, rngs)

        self.blocks = make(rngs)

    def __call__(self, tokens):
        def step(x, block):
            return block(x)

        step = nnx.remat(step) if self.remat else step
        scanned = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(scanned(self.embed(tokens), self.blocks))


def loss(model, tokens):
    """Next-token cross entropy."""
    logits = jax.nn.log_softmax(model(tokens[:, :-1]))
    picked = jax.numpy.take_along_axis(logits, tokens[:, 1:, None], axis=-1)
    return -picked.mean()
