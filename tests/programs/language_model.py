"""A decoder of tokens in Flax nnx: query heads in groups, each with one key head.

Queries have five axes: batch, token, group, head of it, feature. Rotary positions,
dropout on the attention and on the residuals, an embedding that is the head, too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.programs._common import arguments, of_size


class Size(NamedTuple):
    batch: int
    length: int
    vocabulary: int
    width: int
    layers: int
    groups: int
    heads: int  # of a group
    dtype: type | None  # of products; None for that of the parameters


def rotated(x, base=10_000.0):
    """x [B, T, ..., D], each pair of features turned by an angle of its own."""
    half = x.shape[-1] // 2
    rates = base ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None] * rates
    angles = angles.reshape(x.shape[1], *(1,) * (x.ndim - 3), half)
    a, b = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, s: Size, rngs: nnx.Rngs):
        heads = s.groups * s.heads
        self.groups, self.features = s.groups, s.width // heads
        linear = lambda out: nnx.Linear(
            s.width, out, use_bias=False, dtype=s.dtype, rngs=rngs
        )
        self.query, self.out = linear(s.width), linear(s.width)
        self.key = linear(s.groups * self.features)
        self.value = linear(s.groups * self.features)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        b, t, width = x.shape
        q = rotated(self.query(x).reshape(b, t, self.groups, -1, self.features))
        k = rotated(self.key(x).reshape(b, t, self.groups, self.features))
        v = self.value(x).reshape(b, t, self.groups, self.features)
        logits = jnp.einsum("btghd,bsgd->bghts", q, k).astype(float)
        seen = jnp.tril(jnp.ones((t, t), bool))
        logits = jnp.where(seen, logits * self.features**-0.5, -1e30)
        weights = self.dropout(jax.nn.softmax(logits, axis=-1)).astype(v.dtype)
        y = jnp.einsum("bghts,bsgd->btghd", weights, v)
        return self.out(y.reshape(b, t, width))


class Block(nnx.Module):
    def __init__(self, s: Size, rngs: nnx.Rngs):
        hidden = 8 * s.width // 3
        linear = lambda *of: nnx.Linear(*of, use_bias=False, dtype=s.dtype, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(s.width, rngs=rngs) for _ in range(2)])
        self.attention = Attention(s, rngs)
        self.gate, self.up = linear(s.width, hidden), linear(s.width, hidden)
        self.down = linear(hidden, s.width)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norms[0](x)))
        y = self.norms[1](x)
        return x + self.dropout(self.down(nnx.silu(self.gate(y)) * self.up(y)))


class Decoder(nnx.Module):
    def __init__(self, s: Size, rngs: nnx.Rngs):
        self.embed = nnx.Embed(s.vocabulary, s.width, dtype=s.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(s, rngs) for _ in range(s.layers)])
        self.norm = nnx.RMSNorm(s.width, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def loss(model, tokens):
    logits = model(tokens[:, :-1]).astype(float)
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return entropy(logits, tokens[:, 1:]).mean()


def make(size: str):
    s = of_size(
        size,
        small=Size(2, 7, 13, 16, 2, 2, 2, None),
        big=Size(4, 513, 8192, 512, 4, 2, 4, jnp.bfloat16),
    )
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 5, 100)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))

    def init(key):
        k = jax.random.split(key, 3)
        model = Decoder(s, nnx.Rngs(params=k[0], dropout=k[1]))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        tokens = jax.random.randint(k[2], (s.batch, s.length), 0, s.vocabulary)
        return nnx.split((model, optimizer)), tokens

    (graph, state), tokens = arguments(size, init)

    def step(state, tokens):
        model, optimizer = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(loss)(model, tokens)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    return step, (state, tokens), (0,)
