"""BERT, GPT-2, Llama and Whisper in Flax linen, with the parameters of the published.

Layers are those of `models.py`, in one `nn.scan` or one after another. Parameters are
float32; products are taken in bfloat16, as these models are trained.
"""

import dataclasses
import functools

import flax.linen as nn
import jax.numpy as jnp

from benchmarks.models.moe import gated_mlp, one_hot, ragged
from benchmarks.models.transformers import (
    BertConfig,
    Layer,
    LlamaLayer,
    PreLNLayer,
    StackConfig,
    run_layers,
)


class MaskedBert(nn.Module):
    """Token logits at the first 15 % of positions (Devlin et al. 2018).

    From the sums of embeddings to the masked-language head; without the head that tells
    which sentence comes next.
    """

    config: BertConfig
    scanned: bool
    layer: type[nn.Module] = Layer

    @nn.compact
    def __call__(self, tokens):
        c = self.config

        def norm(name):
            return nn.LayerNorm(epsilon=1e-12, dtype=c.dtype, name=name)

        def embed(count, name):
            return nn.Embed(count, c.width, dtype=c.dtype, name=name)

        words, length = embed(c.vocabulary, "tokens"), tokens.shape[1]
        x = words(tokens) + embed(c.positions, "positions")(jnp.arange(length))
        x = norm("norm")(x + embed(2, "types")(jnp.zeros_like(tokens)))
        x = nn.Dropout(c.dropout, deterministic=False)(x)
        x = run_layers(self.layer, c.layers, x, c, scanned=self.scanned)
        x = nn.Dense(c.width, dtype=c.dtype, name="head")(x[:, : int(length * 0.15)])
        x = norm("head_norm")(nn.gelu(x, approximate=False))
        bias = self.param("bias", nn.initializers.zeros, (c.vocabulary,))
        return words.attend(x) + bias.astype(c.dtype)


class GPT2(nn.Module):
    """Token logits at each position [B, S] (Radford et al. 2019); the head is tied."""

    config: StackConfig
    scanned: bool
    layer: type[nn.Module] = PreLNLayer
    vocabulary: int = 50257
    positions: int = 1024

    @nn.compact
    def __call__(self, tokens):
        c = self.config
        words = nn.Embed(self.vocabulary, c.width, dtype=c.dtype, name="tokens")
        places = nn.Embed(self.positions, c.width, dtype=c.dtype, name="positions")
        x = words(tokens) + places(jnp.arange(tokens.shape[1]))
        x = nn.Dropout(c.dropout, deterministic=False)(x)
        x = run_layers(self.layer, c.layers, x, c, scanned=self.scanned)
        return words.attend(nn.LayerNorm(dtype=c.dtype, name="norm")(x))


class Llama(nn.Module):
    """Token logits at each position [B, S] (Grattafiori et al. 2024)."""

    config: StackConfig
    scanned: bool
    layer: type[nn.Module] = LlamaLayer
    vocabulary: int = 128256
    tied: bool = False  # whether the head is the embedding

    @nn.compact
    def __call__(self, tokens):
        c = self.config
        words = nn.Embed(self.vocabulary, c.width, dtype=c.dtype, name="tokens")
        x = words(tokens)
        x = run_layers(self.layer, c.layers, x, c, scanned=self.scanned)
        x = nn.RMSNorm(dtype=c.dtype, name="norm")(x)
        if self.tied:
            return words.attend(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=c.dtype, name="head")(x)


class MixtralLayer(LlamaLayer):
    """A Llama layer with eight MLPs, of which each token has two (Jiang et al. 2024).

    The tokens are sorted by expert; or sent to experts by products with a table of
    zeros and ones, by which some lose an expert (see `moe_models`).
    """

    experts: int = 8
    sorts: bool = True

    def mlp(self, y):
        c, init = self.config, nn.initializers.lecun_normal(batch_axis=0)
        of = (self.experts, c.width, c.hidden)
        shapes = {"gate": of, "up": of, "down": (self.experts, c.hidden, c.width)}
        w = {name: self.param(name, init, shape) for name, shape in shapes.items()}
        router = nn.initializers.lecun_normal()
        w["router"] = self.param("router", router, (c.width, self.experts))
        w = {name: x.astype(c.dtype) for name, x in w.items()}
        out, _ = (ragged if self.sorts else one_hot)(self.expert, y, w)
        return out

    def expert(self, product, x, w):
        return gated_mlp(product, x, w)


class OneHotMixtralLayer(MixtralLayer):
    sorts: bool = False


class CrossLayer(nn.Module):
    """A pre-LN decoder layer; the carry: the stream, and what the encoder gave."""

    config: StackConfig

    @nn.compact
    def __call__(self, carry, _):
        c, (x, seen) = self.config, carry
        attend = functools.partial(
            nn.MultiHeadDotProductAttention, num_heads=c.heads, dtype=c.dtype
        )
        norm = functools.partial(nn.LayerNorm, dtype=c.dtype)
        mask = nn.make_causal_mask(x[..., 0])
        x = x + attend(name="attention")(norm(name="attention_norm")(x), mask=mask)
        x = x + attend(name="cross")(norm(name="cross_norm")(x), seen)
        y = nn.Dense(c.hidden, dtype=c.dtype, name="up")(norm(name="mlp_norm")(x))
        y = nn.Dense(c.width, dtype=c.dtype, name="down")(nn.gelu(y))
        return (x + y, seen), None


class Encoder(nn.Module):
    """Mel spectrograms [B, frames, bins] -> [B, frames / 2, width]."""

    config: StackConfig
    scanned: bool
    layer: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        c = dataclasses.replace(self.config, causal=False)
        conv = functools.partial(nn.Conv, c.width, (3,), padding=1, dtype=c.dtype)
        x = nn.gelu(conv(name="conv_1")(x))
        x = nn.gelu(conv(strides=2, name="conv_2")(x))
        x = x + sinusoids(x.shape[1], c.width).astype(c.dtype)
        x = run_layers(self.layer, c.layers, x, c, scanned=self.scanned)
        return nn.LayerNorm(dtype=c.dtype, name="norm")(x)


def sinusoids(count: int, width: int):
    """The places of a sequence, [count, width]."""
    rates = jnp.exp(-jnp.log(10_000) * jnp.linspace(0, 1, width // 2))
    angles = jnp.arange(count)[:, None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)


class Whisper(nn.Module):
    """Token logits [B, T] of speech (Radford et al. 2022); the head is tied.

    Of (mel spectrograms [B, frames, bins], tokens [B, T]).
    """

    config: StackConfig
    scanned: bool
    layer: type[nn.Module] = PreLNLayer
    cross: type[nn.Module] = CrossLayer
    vocabulary: int = 51_866
    positions: int = 448

    @nn.compact
    def __call__(self, inputs):
        c, (features, tokens) = self.config, inputs
        seen = Encoder(c, self.scanned, self.layer, name="encoder")(features)
        words = nn.Embed(self.vocabulary, c.width, dtype=c.dtype, name="tokens")
        places = nn.Embed(self.positions, c.width, dtype=c.dtype, name="positions")
        x = words(tokens) + places(jnp.arange(tokens.shape[1]))
        x, _ = run_layers(self.cross, c.layers, (x, seen), c, scanned=self.scanned)
        return words.attend(nn.LayerNorm(dtype=c.dtype, name="norm")(x))
