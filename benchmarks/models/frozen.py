"""BERT and Llama layers in Flax linen, unrolled and named, with exchangeable `dense`.

As in `models.py`, but layer after layer, so that single ones can be chosen to train,
and from embeddings on, so that there is an input to differentiate by.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from benchmarks.models.transformers import LLAMA_1B, StackConfig, rotate, run_layers
from benchmarks.models.vision import SelfAttention


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of BERT-base (Devlin et al. 2018, section 3)."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    hidden: int = 3072
    dtype: Any = jnp.bfloat16


class EncoderLayer(nn.Module):
    """A post-LN layer, without dropout as in fine-tuning for features."""

    config: EncoderConfig
    dense: Any

    @nn.compact
    def __call__(self, x, _):
        c = self.config
        norm = functools.partial(nn.LayerNorm, epsilon=1e-12, dtype=c.dtype)
        y = SelfAttention(c, self.dense, name="attention")(x)
        x = norm(name="norm_1")(x + y)
        y = self.dense(c.hidden, dtype=c.dtype, name="up")(x)
        y = self.dense(c.width, dtype=c.dtype, name="down")(
            nn.gelu(y, approximate=False)
        )
        return norm(name="norm_2")(x + y), None


# of Llama-3.2-1B: four of its sixteen layers
LLAMA_4 = replace(LLAMA_1B, layers=4)


class LlamaLayer(nn.Module):
    """That of `transformers`, by `dense(features, name=...)` for each projection."""

    config: StackConfig
    dense: Any = nn.Dense

    @nn.compact
    def __call__(self, x, _):
        c = self.config
        norm = functools.partial(nn.RMSNorm, dtype=c.dtype)
        dense = functools.partial(self.dense, use_bias=False, dtype=c.dtype)
        size, y = c.width // c.heads, norm(name="norm_1")(x)
        heads = lambda count, name: dense(count * size, name=name)(y).reshape(
            *y.shape[:-1], count, size
        )
        places = jnp.arange(x.shape[1], dtype=jnp.float32)
        query, key = (
            rotate(heads(count, name), places)
            for count, name in ((c.heads, "query"), (c.kv_heads, "key"))
        )
        value, often = heads(c.kv_heads, "value"), c.heads // c.kv_heads
        key, value = (jnp.repeat(a, often, axis=2) for a in (key, value))
        mask = nn.make_causal_mask(x[..., 0])
        y = nn.dot_product_attention(query, key, value, mask=mask, dtype=c.dtype)
        x = x + dense(c.width, name="out")(y.reshape(x.shape))
        y = norm(name="norm_2")(x)
        gate, up = (dense(c.hidden, name=name)(y) for name in ("gate", "up"))
        return x + dense(c.width, name="down")(nn.silu(gate) * up), None


class Stack(nn.Module):
    """Layers one after another, on embeddings [B, S, D]."""

    config: Any
    layer: type[nn.Module]
    dense: Any = nn.Dense

    @nn.compact
    def __call__(self, x):
        c = self.config
        return run_layers(self.layer, c.layers, x, c, self.dense, scanned=False)
