"""Transformer blocks that keep what their products keep anyway, once.

For a new model in Flax linen: copy what you need. A model that exists needs none of it,
`jaxmem.substitute` and `jaxmem.schedule` bring it to about the same bytes.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxmem
from jaxmem import ops
from jaxmem.nn import linen


def rotary_embedding(x, theta: float = 10_000.0, first: int = 0):
    """Rotary position embedding of `[..., length, heads, channels]`, from `first` on.

    Halves of the channels are paired: arXiv 2104.09864.
    """
    half = x.shape[-1] // 2
    rate = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.outer(first + jnp.arange(x.shape[-3], dtype=jnp.float32), rate)
    angle = angle.reshape(*[1] * (x.ndim - 3), x.shape[-3], 1, half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)


class ActivatedDense(nn.Dense):
    """A dense layer of an activation; keeps the inputs of the activation.

    A GELU in D -> F -> D keeps one array of F channels and not two, a SwiGLU two and
    not three, and no product is done twice.
    """

    activation: Callable[..., jax.Array] = ops.gelu

    @nn.compact
    def __call__(self, *inputs):
        width = inputs[0].shape[-1]
        kernel = self.param("kernel", self.kernel_init, (width, self.features))
        dtype = self.dtype or jnp.result_type(inputs[0], kernel)

        def run(inputs, kernel):
            return ops.dense(self.activation(*inputs), kernel, dtype=dtype)

        keep = {"policy": jax.checkpoint_policies.nothing_saveable}
        y = jax.checkpoint(run, prevent_cse=False, **keep)(inputs, kernel)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,))
            y += jnp.broadcast_to(bias.astype(y.dtype), y.shape)
        return y


class Attention(nn.Module):
    """Projections, `jaxmem.ops.dot_product_attention`, projection."""

    num_heads: int
    num_kv_heads: int
    causal: bool
    use_bias: bool
    rotary: bool = False
    dropout_rate: float = 0.0
    dtype: Any = None

    @nn.compact
    def __call__(self, x, mask, deterministic: bool):
        def dense(features, name: str, axis=-1):
            how = {"use_bias": self.use_bias, "dtype": self.dtype}
            return linen.DenseGeneral(features, axis, name=name, **how)

        head = x.shape[-1] // self.num_heads
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        names = zip(("query", "key", "value"), counts, strict=True)
        q, k, v = (dense((count, head), name)(x) for name, count in names)
        if self.rotary:
            q, k = rotary_embedding(q), rotary_embedding(k)
        rate = 0.0 if deterministic else self.dropout_rate
        y = ops.dot_product_attention(
            *(q, k, v),
            mask=mask,
            is_causal=self.causal,
            dropout_rate=rate,
            dropout_rng=self.make_rng("dropout") if rate else None,
        )
        return dense(x.shape[-1], "out", (-2, -1))(y)


class TransformerBlock(nn.Module):
    """Attention and an MLP with residuals: pre-LN (GPT, ViT) or post-LN (BERT).

    Saves: for N tokens of width D and a hidden width F the outputs of both norms (2 N D
    numbers), query, key, value and the output of attention (4 N D), the input of the
    activation (N F), and a few float32 a token. Dropout: a key.
    """

    num_heads: int
    mlp_dim: int
    norm: str = "pre"
    causal: bool = False
    dropout_rate: float = 0.0
    dtype: Any = None
    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x, mask=None, deterministic: bool | None = None):
        if self.dropout_rate:
            here = self.deterministic
            deterministic = nn.merge_param("deterministic", here, deterministic)
        how = {"dtype": self.dtype}
        heads = self.num_heads, self.num_heads
        rate = self.dropout_rate
        attention = Attention(
            *heads, self.causal, True, dropout_rate=rate, name="attention", **how
        )
        up = linen.Dense(self.mlp_dim, name="up", **how)
        down = ActivatedDense(x.shape[-1], name="down", **how)

        def norm(name: str):
            return linen.LayerNorm(name=name, save="output", **how)

        def drop(y):
            return linen.Dropout(rate)(y, deterministic or not rate)

        def attended(y):
            return drop(attention(y, mask, deterministic or not rate))

        norms = norm("attention_norm"), norm("mlp_norm")
        for norm, layer in zip(
            norms, (attended, lambda y: drop(down(up(y)))), strict=True
        ):
            x = x + layer(norm(x)) if self.norm == "pre" else norm(x + layer(x))
        return x


class LlamaBlock(nn.Module):
    """RMSNorm, grouped causal attention with rotary embedding, RMSNorm, SwiGLU.

    Saves: for N tokens of width D, a hidden width F and K of H heads for keys the
    outputs of both norms, query and attention's output (4 N D numbers), key and value
    (2 N D K / H), both projections of the MLP (2 N F), and a few float32 a token.
    """

    num_heads: int
    mlp_dim: int
    num_kv_heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x, mask=None):
        how = {"dtype": self.dtype}
        plain = {"use_bias": False, **how}

        def norm(name: str):
            return linen.RMSNorm(name=name, save="output", **how)

        heads = self.num_heads, self.num_kv_heads
        attention = Attention(*heads, True, rotary=True, name="attention", **plain)
        x = x + attention(norm("attention_norm")(x), mask, True)
        y = norm("mlp_norm")(x)
        gate, up = (
            linen.Dense(self.mlp_dim, name=n, **plain)(y) for n in ("gate", "up")
        )
        swiglu = {"activation": ops.swiglu, **plain}
        return x + ActivatedDense(x.shape[-1], name="down", **swiglu)(gate, up)


def main() -> None:
    x = jnp.ones((2, 128, 256), jnp.bfloat16)
    blocks = {
        "pre-LN": TransformerBlock(4, 1024, dtype=jnp.bfloat16),
        "post-LN": TransformerBlock(4, 1024, "post", dtype=jnp.bfloat16),
        "Llama": LlamaBlock(4, 1024, 2, dtype=jnp.bfloat16),
    }
    for name, block in blocks.items():
        params = block.init(jax.random.key(0), x)
        loss = lambda params, x, block=block: jnp.mean(block.apply(params, x) ** 2)
        print(f"{name}: {jaxmem.residuals(loss, params, x)}")


if __name__ == "__main__":
    main()
