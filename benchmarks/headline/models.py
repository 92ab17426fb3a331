"""The models of `benchmarks.headlines` that the other benchmarks do not have.

Each takes its parts as arguments, so that a paper's layer can stand in the place of
Flax's. Layers come one after another, as PyTorch has them, unless said otherwise.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from benchmarks.models.frozen import LlamaLayer
from benchmarks.models.transformers import StackConfig, run_layers


@dataclass(frozen=True)
class Parts:
    """What layers are made of; Flax's own, if nothing else is said."""

    dense: Any = nn.Dense
    act: Callable = functools.partial(nn.gelu, approximate=False)
    norm: Any = nn.LayerNorm


@dataclass(frozen=True)
class Sizes:
    """Sizes of BERT-base (Devlin et al. 2018, section 3); others by argument."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    hidden: int = 3072
    dropout: float = 0.1
    dtype: Any = jnp.float32


class Attention(nn.Module):
    """Flax's attention between projections of `dense`; `memory` is attended if given.

    `bias` is added to the scores, [heads, queries, keys].
    """

    sizes: Sizes
    dense: Any

    @nn.compact
    def __call__(self, x, memory=None, bias=None):
        c = self.sizes
        memory = x if memory is None else memory

        def heads(name, of):
            y = self.dense(c.width, dtype=c.dtype, name=name)(of)
            return y.reshape(*y.shape[:-1], c.heads, c.width // c.heads)

        y = nn.dot_product_attention(
            heads("query", x),
            heads("key", memory),
            heads("value", memory),
            bias=bias,
            broadcast_dropout=False,
            dropout_rng=self.make_rng("dropout") if c.dropout else None,
            dropout_rate=c.dropout,
            deterministic=c.dropout == 0,
            dtype=c.dtype,
        )
        y = y.reshape(*y.shape[:-2], c.width)
        return self.dense(c.width, dtype=c.dtype, name="out")(y)


class EncoderLayer(nn.Module):
    """Attention and an MLP; the norm after the sum (BERT), or before them (ViT)."""

    sizes: Sizes
    parts: Parts
    norm_first: bool

    @nn.compact
    def __call__(self, x, _):
        c, parts = self.sizes, self.parts
        drop = nn.Dropout(c.dropout, deterministic=c.dropout == 0)
        norm = lambda name, x: parts.norm(dtype=c.dtype, name=name)(x)
        dense = functools.partial(parts.dense, dtype=c.dtype)
        attention = Attention(c, parts.dense, name="attention")

        def mlp(x):
            return dense(c.width, name="down")(parts.act(dense(c.hidden, name="up")(x)))

        if self.norm_first:
            x = x + drop(attention(norm("norm_1", x)))
            return x + drop(mlp(norm("norm_2", x))), None
        x = norm("norm_1", x + drop(attention(x)))
        return norm("norm_2", x + drop(mlp(x))), None


class TextClassifier(nn.Module):
    """Two class logits of tokens [B, S], from the first one: RoBERTa on MRPC."""

    sizes: Sizes = Sizes()
    parts: Parts = Parts()
    words: int = 50_265
    classes: int = 2

    @nn.compact
    def __call__(self, tokens):
        c = self.sizes
        embed = functools.partial(nn.Embed, features=c.width, dtype=c.dtype)
        x = embed(self.words, name="tokens")(tokens)
        x = x + embed(514, name="positions")(jnp.arange(tokens.shape[1]))
        x = nn.LayerNorm(dtype=c.dtype, name="norm")(x)
        x = nn.Dropout(c.dropout, deterministic=c.dropout == 0)(x)
        layers = c, self.parts, False
        x = run_layers(EncoderLayer, c.layers, x, *layers, scanned=False)
        x = nn.tanh(nn.Dense(c.width, dtype=c.dtype, name="pooler")(x[:, 0]))
        return nn.Dense(self.classes, dtype=c.dtype, name="head")(x)


class ImageClassifier(nn.Module):
    """Class logits of images [B, 224, 224, 3]: ViT-B/16, which is DeiT-B too."""

    sizes: Sizes = Sizes(dropout=0.0, dtype=jnp.bfloat16)
    parts: Parts = Parts()
    classes: int = 1000

    @nn.compact
    def __call__(self, x):
        c = self.sizes
        patches = nn.Conv(c.width, (16, 16), 16, dtype=c.dtype, name="patches")
        x = patches(x.astype(c.dtype))
        x = x.reshape(x.shape[0], -1, c.width)
        place = self.param("place", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        layers = c, self.parts, True
        x = x + place.astype(c.dtype)
        x = run_layers(EncoderLayer, c.layers, x, *layers, scanned=False)
        x = nn.LayerNorm(dtype=c.dtype, name="norm")(x)
        return nn.Dense(self.classes, dtype=c.dtype, name="head")(x.mean(1))


# -- T5-base (Raffel et al. 2019): RMS norms, ReLU, no biases, scores by distance


class T5Layer(nn.Module):
    """A layer of the encoder, or of the decoder if `memory` is the encoder's output."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x, bias, memory=None):
        c = self.sizes
        drop = nn.Dropout(c.dropout, deterministic=c.dropout == 0)
        norm = lambda name, x: nn.RMSNorm(dtype=c.dtype, name=name)(x)
        dense = functools.partial(nn.Dense, use_bias=False)
        x = x + drop(Attention(c, dense, name="own")(norm("norm_1", x), None, bias))
        if memory is not None:
            other = Attention(c, dense, name="memory")
            x = x + drop(other(norm("norm_2", x), memory))
        y = nn.relu(dense(c.hidden, name="up")(norm("norm_3", x)))
        return x + drop(dense(c.width, name="down")(drop(y)))


class T5(nn.Module):
    """Logits of embedded inputs [B, S, D], which go into encoder and decoder."""

    sizes: Sizes = Sizes()
    classes: int = 5000

    @nn.compact
    def __call__(self, x):
        c, tokens = self.sizes, x.shape[1]
        causal = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), 0.0, -1e9)
        memory, y = x, x
        bias = self.distances("encoder_bias", tokens)
        for number in range(c.layers):
            memory = T5Layer(c, name=f"encoder_{number}")(memory, bias)
        memory = nn.RMSNorm(dtype=c.dtype, name="encoder_norm")(memory)
        bias = self.distances("decoder_bias", tokens) + causal
        for number in range(c.layers):
            y = T5Layer(c, name=f"decoder_{number}")(y, bias, memory)
        y = nn.RMSNorm(dtype=c.dtype, name="decoder_norm")(y)
        return nn.Dense(self.classes, use_bias=False, name="head")(y)

    def distances(self, name: str, tokens: int):
        """A number for each head and distance, by 32 buckets of the latter."""
        table = nn.Embed(32, self.sizes.heads, name=name)
        steps = jnp.arange(tokens)
        apart = jnp.abs(steps[:, None] - steps)
        bucket = jnp.minimum(31, jnp.log2(1 + apart) * 4).astype(jnp.int32)
        return table(bucket).transpose(2, 0, 1)


# -- Llama with a dense layer of each projection's own


class LlamaBlocks(nn.Module):
    """Layers in one `nn.scan`, on embeddings [B, S, D]; then class logits, if any."""

    config: StackConfig
    dense: Any = nn.Dense
    classes: int = 0

    @nn.compact
    def __call__(self, x):
        c = self.config
        stack = nn.scan(
            LlamaLayer,
            variable_axes={"params": 0, "velora": 0},
            split_rngs={"params": True, "dropout": True},
            length=c.layers,
        )
        x = stack(c, self.dense, name="layers")(x, None)[0]
        if not self.classes:
            return x
        x = nn.RMSNorm(dtype=c.dtype, name="norm")(x)
        return nn.Dense(self.classes, use_bias=False, dtype=c.dtype, name="head")(x)


# -- ResNet whose batch norms come with their activation


def norm_then_act(act: bool, dtype: Any, name: str):
    """Batch norm, and a leaky ReLU if `act`."""
    norm = nn.BatchNorm(False, momentum=0.9, dtype=dtype, name=name)
    return lambda x: nn.leaky_relu(norm(x)) if act else norm(x)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, each with batch norm, and a shortcut."""

    width: int
    stride: int
    normed: Callable
    dtype: Any

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        normed = functools.partial(self.normed, dtype=self.dtype)
        y = normed(True, name="n1")(conv(self.width, (1, 1))(x))
        y = normed(True, name="n2")(conv(self.width, (3, 3), self.stride)(y))
        y = normed(False, name="n3")(conv(4 * self.width, (1, 1))(y))
        if x.shape != y.shape:
            x = conv(4 * self.width, (1, 1), self.stride, name="short")(x)
            x = normed(False, name="short_norm")(x)
        return nn.leaky_relu(x + y)


class LeakyResNet(nn.Module):
    """ResNet with leaky ReLUs (He et al. 2015; sizes of ResNet-101)."""

    stages: tuple[int, ...] = (3, 4, 23, 3)
    normed: Callable = norm_then_act
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x):
        conv = nn.Conv(64, (7, 7), 2, 3, use_bias=False, dtype=self.dtype, name="stem")
        x = conv(x.astype(self.dtype))
        x = self.normed(True, dtype=self.dtype, name="stem_norm")(x)
        x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                settings = 64 * 2**stage, stride, self.normed, self.dtype
                x = Bottleneck(*settings, name=f"block_{stage}_{block}")(x)
        return nn.Dense(1000, dtype=self.dtype, name="head")(x.mean((1, 2)))
