"""ResNet and ViT in Flax linen, as a user writes them: plain layers, layer after layer.

Layers are unrolled, with a name each, so that single ones can be chosen for training;
those of ViT may be scanned.
"""

import functools
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from benchmarks.models.transformers import run_layers


@dataclass(frozen=True)
class ResNetConfig:
    """Sizes of ResNet-101 (He et al. 2015, table 1); smaller ones by argument."""

    stages: tuple[int, ...] = (3, 4, 23, 3)
    width: int = 64
    classes: int = 1000
    dtype: Any = jnp.bfloat16


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, each with batch norm, and a shortcut."""

    width: int
    stride: int
    train: bool
    dtype: Any

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm,
            use_running_average=not self.train,
            momentum=0.9,
            dtype=self.dtype,
        )
        y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.width, (3, 3), self.stride)(y)))
        y = norm()(conv(4 * self.width, (1, 1))(y))
        if x.shape != y.shape:
            x = norm(name="short_norm")(
                conv(4 * self.width, (1, 1), self.stride, name="short")(x)
            )
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Class logits of images [B, H, W, 3]."""

    config: ResNetConfig
    train: bool = True
    layer: type[nn.Module] = Bottleneck

    @nn.compact
    def __call__(self, x):
        c = self.config
        x = x.astype(c.dtype)
        x = nn.Conv(
            c.width, (7, 7), 2, padding=3, use_bias=False, dtype=c.dtype, name="stem"
        )(x)
        x = nn.BatchNorm(not self.train, dtype=c.dtype, name="stem_norm")(x)
        x = nn.max_pool(nn.relu(x), (3, 3), (2, 2), ((1, 1), (1, 1)))
        number = 0
        for stage, blocks in enumerate(c.stages):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                x = self.layer(
                    c.width * 2**stage,
                    stride,
                    self.train,
                    c.dtype,
                    name=f"block_{number}",
                )(x)
                number += 1
        return nn.Dense(c.classes, dtype=c.dtype, name="head")(x.mean((1, 2)))


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of ViT-B/16 (Dosovitskiy et al. 2020, table 1); others by argument."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    hidden: int = 3072
    patch: int = 16
    classes: int = 1000
    dtype: Any = jnp.bfloat16


class ViTLayer(nn.Module):
    """A pre-LN encoder layer."""

    config: ViTConfig
    dense: Any

    @nn.compact
    def __call__(self, x, _):
        c = self.config
        norm = functools.partial(nn.LayerNorm, dtype=c.dtype)
        x = x + SelfAttention(c, self.dense, name="attention")(norm(name="norm_1")(x))
        y = self.dense(c.hidden, dtype=c.dtype, name="up")(norm(name="norm_2")(x))
        return x + self.dense(c.width, dtype=c.dtype, name="down")(nn.gelu(y)), None


class ViT(nn.Module):
    """Class logits of images [B, H, W, 3], from the mean of the tokens.

    `dense` makes the linear layers of a block, say with LoRA in them.
    """

    config: ViTConfig
    dense: Any = nn.Dense
    scanned: bool = False
    layer: type[nn.Module] = ViTLayer

    @nn.compact
    def __call__(self, x):
        c = self.config
        x = nn.Conv(
            c.width, (c.patch, c.patch), c.patch, dtype=c.dtype, name="patches"
        )(x.astype(c.dtype))
        x = x.reshape(x.shape[0], -1, c.width)
        place = nn.initializers.normal(0.02)
        x = x + self.param("place", place, (1, *x.shape[1:])).astype(c.dtype)
        x = run_layers(self.layer, c.layers, x, c, self.dense, scanned=self.scanned)
        x = nn.LayerNorm(dtype=c.dtype, name="norm")(x)
        return nn.Dense(c.classes, dtype=c.dtype, name="head")(x.mean(1))


class SelfAttention(nn.Module):
    """Projections from `dense`, and Flax's attention between them."""

    config: Any
    dense: Any

    @nn.compact
    def __call__(self, x):
        c = self.config
        shape = (*x.shape[:-1], c.heads, c.width // c.heads)
        query, key, value = (
            self.dense(c.width, dtype=c.dtype, name=name)(x).reshape(shape)
            for name in ("query", "key", "value")
        )
        y = nn.dot_product_attention(query, key, value, dtype=c.dtype)
        return self.dense(c.width, dtype=c.dtype, name="out")(y.reshape(x.shape))
