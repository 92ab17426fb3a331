"""A BERT and a GPT in nnx whose layers are unrolled, each layer under a policy.

Twelve layers in a Python loop, as nnx users write them; widths of the published base
models.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.models import wrapped

LAYERS, WIDTH, HEADS = 12, 768, 12
TOKENS = jax.ShapeDtypeStruct((16, 512), jnp.int32)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the two models differ by."""

    vocabulary: int
    causal: bool  # with LayerNorm in front of each half of a layer, not behind


BERT, GPT = Kind(30522, causal=False), Kind(50257, causal=True)


class Layer(nnx.Module):
    def __init__(self, kind: Kind, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, rngs=rngs, dtype=jnp.bfloat16)
        self.kind = kind
        self.qkv = nnx.List([linear(WIDTH, WIDTH) for _ in range(3)])
        self.out = linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)
        norm = functools.partial(nnx.LayerNorm, rngs=rngs, dtype=jnp.bfloat16)
        self.norms = nnx.List([norm(WIDTH) for _ in range(2)])
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        if self.kind.causal:
            x = x + self.drop(self.attend(self.norms[0](x)))
            return x + self.drop(self.feed(self.norms[1](x)))
        x = self.norms[0](x + self.drop(self.attend(x)))
        return self.norms[1](x + self.drop(self.feed(x)))

    def attend(self, x):
        q, k, v = (one(x).reshape(*x.shape[:2], HEADS, -1) for one in self.qkv)
        if self.kind.causal:
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
            y = jnp.einsum("bhqk,bkhd->bqhd", self.drop(jax.nn.softmax(scores)), v)
        return self.out(y.reshape(x.shape))

    def feed(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, kind: Kind, rngs: nnx.Rngs, layers: int = LAYERS):
        how = {"rngs": rngs, "dtype": jnp.bfloat16}
        self.words = nnx.Embed(kind.vocabulary, WIDTH, **how)
        self.positions = nnx.Embed(TOKENS.shape[1], WIDTH, **how)
        self.layers = nnx.List([Layer(kind, rngs) for _ in range(layers)])

    def __call__(self, tokens, policy=None):
        x = self.words(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        run = wrapped.under(policy, lambda layer, x: layer(x), nnx.remat)
        for layer in self.layers:
            x = run(layer, x)
        return self.words.attend(x)


def gradient(policy, kind: Kind = BERT, layers: int = LAYERS):
    """The gradient of the cross entropy of the next words, and its arguments."""
    model = nnx.eval_shape(lambda: Model(kind, nnx.Rngs(0), layers))

    def loss(model, tokens):
        logits = model(tokens, policy)[:, :-1].astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)

    return lambda model, tokens: nnx.grad(loss)(model, tokens), (model, TOKENS)
