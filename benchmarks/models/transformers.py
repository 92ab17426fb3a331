"""Transformers in Flax linen, as a user writes them: plain layers under `nn.scan`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp


def run_layers(layer, count, x, *settings, scanned=True):
    """`x` through `count` layers: in one `nn.scan`, or one after another by name."""
    if scanned:
        stack = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=count,
        )
        return stack(*settings, name="layers")(x, None)[0]
    for number in range(count):
        x, _ = layer(*settings, name=f"layer_{number}")(x, None)
    return x


@dataclass(frozen=True)
class BertConfig:
    """Sizes of BERT-Large (Devlin et al. 2018, section 3); smaller ones by argument."""

    layers: int = 24
    width: int = 1024
    heads: int = 16
    hidden: int = 4096
    vocabulary: int = 30522
    positions: int = 512
    dropout: float = 0.1
    dtype: jnp.dtype = jnp.bfloat16


class Layer(nn.Module):
    """One post-LN encoder layer; the carry is the residual stream."""

    config: BertConfig
    deterministic: bool = False

    @nn.compact
    def __call__(self, x, _):
        c = self.config
        dropout = nn.Dropout(c.dropout, deterministic=self.deterministic)
        attention = nn.MultiHeadDotProductAttention(
            num_heads=c.heads,
            dtype=c.dtype,
            dropout_rate=c.dropout,
            broadcast_dropout=False,
            deterministic=self.deterministic,
            name="attention",
        )
        y = dropout(attention(x))
        x = nn.LayerNorm(epsilon=1e-12, dtype=c.dtype, name="attention_norm")(x + y)
        y = nn.Dense(c.hidden, dtype=c.dtype, name="up")(x)
        y = nn.gelu(y, approximate=False)
        y = dropout(nn.Dense(c.width, dtype=c.dtype, name="down")(y))
        x = nn.LayerNorm(epsilon=1e-12, dtype=c.dtype, name="output_norm")(x + y)
        return x, None


class Bert(nn.Module):
    """Token logits at the first 15 % of positions, as masked-language training has."""

    config: BertConfig
    deterministic: bool = False
    layer: type[nn.Module] = Layer

    @nn.compact
    def __call__(self, tokens):
        c = self.config
        embed = nn.Embed(c.vocabulary, c.width, dtype=c.dtype, name="tokens")
        place = nn.Embed(c.positions, c.width, dtype=c.dtype, name="positions")
        x = embed(tokens) + place(jnp.arange(tokens.shape[1]))
        x = run_layers(self.layer, c.layers, x, c, self.deterministic)
        return embed.attend(x[:, : max(1, int(tokens.shape[1] * 0.15))])


@dataclass(frozen=True)
class StackConfig:
    """Sizes of a stack of blocks; those of GPT-2 medium."""

    layers: int = 24
    width: int = 1024
    heads: int = 16
    kv_heads: int = 16
    hidden: int = 4096
    dropout: float = 0.1
    causal: bool = True
    dtype: jnp.dtype = jnp.bfloat16
    fused: bool = False  # attention by cuDNN, as `jax.nn` has it: one argument
    head: int | None = None  # channels of a head; None: the heads share the width
    qk_norm: bool = False  # queries and keys are normalised, head by head
    gate: Callable = nn.silu  # of an MLP with a gate
    lora: int = 0  # rank of adapters beside each product; 0: none

    @property
    def channels(self) -> int:
        """Of a head."""
        return self.head or self.width // self.heads

    @property
    def attention(self) -> str | None:
        """`implementation` of `jax.nn.dot_product_attention`."""
        return "cudnn" if self.fused else None


GPT2_MEDIUM = StackConfig()
VIT_LARGE = StackConfig(dropout=0.0, causal=False)
LLAMA_1B = StackConfig(16, 2048, 32, 8, 8192, 0.0)


def fused_attention(query, key, value, bias=None, mask=None, **_):
    """For Flax: cuDNN's, which has neither dropout nor a mask here."""
    assert bias is None and mask is None
    return jax.nn.dot_product_attention(query, key, value, implementation="cudnn")


class PreLNLayer(nn.Module):
    """A pre-LN layer of GPT-2 or ViT; the carry is the residual stream."""

    config: StackConfig

    @nn.compact
    def __call__(self, x, _):
        c = self.config
        dropout = nn.Dropout(c.dropout, deterministic=c.dropout == 0)
        mask = nn.make_causal_mask(x[..., 0]) if c.causal else None
        y = nn.LayerNorm(dtype=c.dtype, name="attention_norm")(x)
        attention = nn.MultiHeadDotProductAttention(
            num_heads=c.heads,
            dtype=c.dtype,
            dropout_rate=c.dropout,
            broadcast_dropout=False,
            deterministic=c.dropout == 0,
            attention_fn=fused_attention if c.fused else nn.dot_product_attention,
            name="attention",
        )
        x = x + dropout(attention(y, mask=mask))
        y = nn.LayerNorm(dtype=c.dtype, name="mlp_norm")(x)
        y = nn.gelu(nn.Dense(c.hidden, dtype=c.dtype, name="up")(y))
        return x + dropout(nn.Dense(c.width, dtype=c.dtype, name="down")(y)), None


def rotate(x, positions, base: float = 10_000):
    """Rotary embedding of [batch, length, heads, channels], halves paired."""
    half = x.shape[-1] // 2
    angle = positions[:, None] / base ** (jnp.arange(half) / half)
    cos, sin = (f(angle)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Adapted(nn.Module):
    """A product without a bias, and one of low rank beside it (Hu et al. 2021)."""

    features: int | tuple[int, ...]
    axis: int | tuple[int, ...]
    rank: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        how = {"use_bias": False, "dtype": self.dtype}
        product = functools.partial(nn.DenseGeneral, **how)
        low = product(self.rank, self.axis, name="lora_a")(x)
        zeros = nn.initializers.zeros
        high = product(self.features, kernel_init=zeros, name="lora_b")(low)
        return product(self.features, self.axis, name="base")(x) + high


class LlamaLayer(nn.Module):
    """RMSNorm, grouped causal attention with rotary embedding, SwiGLU; no biases."""

    config: StackConfig

    @nn.compact
    def __call__(self, x, _):
        c, dense = self.config, self.dense
        y = nn.RMSNorm(dtype=c.dtype, name="attention_norm")(x)
        places = jnp.arange(x.shape[1], dtype=jnp.float32)
        q = dense((c.heads, c.channels), "query")(y)
        k = dense((c.kv_heads, c.channels), "key")(y)
        v = dense((c.kv_heads, c.channels), "value")(y)
        if c.qk_norm:
            q = nn.RMSNorm(dtype=c.dtype, name="query_norm")(q)
            k = nn.RMSNorm(dtype=c.dtype, name="key_norm")(k)
        q, k = rotate(q, places), rotate(k, places)
        how = {"is_causal": c.causal, "implementation": c.attention}
        y = jax.nn.dot_product_attention(q, k, v, **how)
        x = x + dense(c.width, "out", (-2, -1))(y)
        return x + self.mlp(nn.RMSNorm(dtype=c.dtype, name="mlp_norm")(x)), None

    def dense(self, features, name, axis=-1):
        c = self.config
        settings = {"use_bias": False, "dtype": c.dtype, "name": name}
        if c.lora:
            return Adapted(features, axis, c.lora, c.dtype, name=name)
        return nn.DenseGeneral(features, axis, **settings)

    def mlp(self, y):
        c, dense = self.config, self.dense
        y = c.gate(dense(c.hidden, "gate")(y)) * dense(c.hidden, "up")(y)
        return dense(c.width, "down")(y)


class Stack(nn.Module):
    """Layers alone, on what an embedding would give."""

    config: StackConfig
    layer: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        return run_layers(self.layer, self.config.layers, x, self.config)


def mean_square(model):
    """`loss(params, x, key)`: a number that needs every layer."""

    def loss(params, x, key):
        y = model.apply({"params": params}, x, rngs={"dropout": key})
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    return loss


def masked_loss(model):
    """`loss(params, tokens, key)`: mean cross entropy of the predicted positions."""

    def loss(params, tokens, key):
        logits = model.apply({"params": params}, tokens, rngs={"dropout": key})
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        labels = tokens[:, : logits.shape[1], None]
        return -jnp.take_along_axis(log_probs, labels, -1).mean()

    return loss


def abstract_params(model, tokens):
    """Shapes and dtypes of the parameters; nothing is allocated."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return jax.eval_shape(model.init, keys, tokens)["params"]
