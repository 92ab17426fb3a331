"""Small linen models in the styles people write: compact, setup, scan, remat, state."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn


class Block(nn.Module):
    """Post-LN encoder layer with modules and a bare gelu, in compact style."""

    heads: int = 2
    dtype: Any = None
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, deterministic):
        a = nn.MultiHeadDotProductAttention(
            self.heads,
            dtype=self.dtype,
            dropout_rate=self.dropout,
            deterministic=deterministic,
            broadcast_dropout=False,
        )(x)
        a = nn.Dropout(self.dropout, deterministic=deterministic)(a)
        x = nn.LayerNorm(dtype=self.dtype)(x + a)
        h = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype)(x), approximate=False)
        h = nn.Dense(x.shape[-1], dtype=self.dtype)(h)
        h = nn.Dropout(self.dropout, deterministic=deterministic)(h)
        return nn.LayerNorm(dtype=self.dtype)(x + h)


class _Body(nn.Module):
    """A Block with the signature `nn.scan` wants."""

    dtype: Any
    dropout: float
    deterministic: bool

    @nn.compact
    def __call__(self, x, _):
        return Block(dtype=self.dtype, dropout=self.dropout)(
            x, self.deterministic
        ), None


class Bert(nn.Module):
    """Encoder whose layers run in a loop, in nn.scan, in nn.remat or in both."""

    layers: int = 2
    width: int = 16
    vocab: int = 11
    style: str = "loop"
    dtype: Any = None
    dropout: float = 0.0

    @nn.compact
    def __call__(self, tokens, deterministic=True):
        x = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)
        block = nn.remat(_Body) if "remat" in self.style else _Body
        options = dict(
            dtype=self.dtype, dropout=self.dropout, deterministic=deterministic
        )
        if "scan" in self.style:
            scanned = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=self.layers,
            )
            x, _ = scanned(**options, name="layers")(x, None)
        else:
            for i in range(self.layers):
                x, _ = block(**options, name=f"layer_{i}")(x, None)
        return nn.Dense(self.vocab, dtype=self.dtype)(x).astype(jnp.float32)


class GptBlock(nn.Module):
    """Pre-LN decoder layer in setup style; the norm is shared by both halves."""

    width: int

    def setup(self):
        self.norm = nn.RMSNorm()
        self.attention = nn.SelfAttention(2)
        self.mlp = nn.Sequential(
            [nn.Dense(4 * self.width), nn.silu, nn.Dense(self.width)]
        )

    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.mlp(self.norm(x))


class Gpt(nn.Module):
    """Decoder in setup style, with a second method and a module passed in."""

    head: nn.Module
    layers: int = 2
    width: int = 16
    vocab: int = 11

    def setup(self):
        self.embed = nn.Embed(self.vocab, self.width)
        self.blocks = [GptBlock(self.width) for _ in range(self.layers)]

    def features(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def __call__(self, tokens):
        return self.head(self.features(tokens))


class ResNet(nn.Module):
    """Convolutions, BatchNorm with running statistics, and a last scale of zeros."""

    @nn.compact
    def __call__(self, x, train):
        for _ in range(2):
            h = nn.Conv(8, (3, 3), use_bias=False)(x)
            h = nn.BatchNorm(use_running_average=not train, momentum=0.9)(h)
            h = nn.Conv(8, (3, 3))(nn.relu(h))
            h = nn.GroupNorm(4)(h)
            h = nn.LayerNorm(scale_init=nn.initializers.zeros)(h)
            x = nn.Conv(8, (1, 1))(x) + h
        return nn.Dense(5)(x.mean((1, 2)))
