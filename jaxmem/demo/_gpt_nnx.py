"""A byte-level GPT in Flax nnx, as one would write it without thinking of memory.

nnx does not name its modules in the compiled program as linen does; the named scopes
are there for the sake of the figure "bytes by module".
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmem.demo._settings import Settings


class Block(nnx.Module):
    """Pre-LN attention and a GELU MLP, each added to the residual stream."""

    def __init__(self, settings: Settings, rngs: nnx.Rngs):
        width = settings.width
        self.norm_attention = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            settings.heads,
            width,
            dropout_rate=settings.dropout,
            decode=False,
            keep_rngs=False,
            rngs=rngs,
        )
        self.norm_mlp = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(settings.dropout)

    def __call__(self, x, mask, key):
        rngs = None if key is None else nnx.Rngs(key)
        still = {"deterministic": key is None, "rngs": rngs}
        with jax.named_scope("attention"):
            h = self.attention(self.norm_attention(x), mask=mask, **still)
            x = x + self.dropout(h, **still)
        with jax.named_scope("mlp"):
            h = self.down(nnx.gelu(self.up(self.norm_mlp(x))))
            return x + self.dropout(h, **still)


def _stack(length: int, settings: Settings, rngs: nnx.Rngs) -> Block:
    """Blocks as one, their parameters stacked: compiled once, not once a layer."""

    @nnx.split_rngs(splits=length)
    @nnx.vmap
    def make(rngs):
        return Block(settings, rngs)

    return make(rngs)


@nnx.scan(in_axes=(0, nnx.Carry, None, 0), out_axes=nnx.Carry)
def _run(block, x, mask, key):
    return block(x, mask, key)


class GPT(nnx.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, settings: Settings, rngs: nnx.Rngs):
        s = settings
        self.embed = nnx.Embed(256, s.width, rngs=rngs)
        self.position = nnx.Embed(s.context, s.width, rngs=rngs)
        self.stacks = tuple(s.stacks.items())
        for name, layers in s.stacks.items():
            setattr(self, name, _stack(layers, s, rngs))
        self.norm = nnx.LayerNorm(s.width, rngs=rngs)
        self.head = nnx.Linear(s.width, 256, rngs=rngs)

    def __call__(
        self, tokens: Int[Array, "batch length"], key: jax.Array | None = None
    ) -> Float[Array, "batch length 256"]:
        length = tokens.shape[1]
        with jax.named_scope("embed"):
            x = self.embed(tokens) + self.position(jnp.arange(length))[None]
        mask = nnx.make_causal_mask(jnp.ones((1, length)))
        for number, (name, layers) in enumerate(self.stacks):
            keys = None
            if key is not None:
                keys = jax.random.split(jax.random.fold_in(key, number), layers)
            x = _run(getattr(self, name), x, mask, keys)
        with jax.named_scope("head"):
            return self.head(self.norm(x))


def build(settings: Settings) -> GPT:
    """The model with its initial values."""
    return GPT(settings, nnx.Rngs(settings.seed))


def split(model: nnx.Module, settings: Settings):
    """Initial parameters and the pure `forward(params, tokens, key)` of a model."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def forward(params, tokens, key=None):
        return nnx.merge(graph, params, rest)(tokens, key)

    return jax.tree.map(jnp.copy, params), forward
