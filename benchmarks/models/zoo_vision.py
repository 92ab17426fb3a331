"""Convolutional nets in Flax linen with the parameters that were published.

AlexNet, VGG, the nets of inverted residuals (MobileNetV2, MnasNet, EfficientNet-B0) and
U-Net, layer after layer and in float32. Where papers and what is in use differ (AlexNet
on one GPU, U-Net with padding), the shapes are those in use.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

POOL = ((3, 3), (2, 2))


def classifier(x, widths=(4096, 4096), classes=1000):
    """Dense layers with dropout before each, and the class logits."""
    x = x.reshape(x.shape[0], -1)
    for width in widths:
        x = nn.Dropout(0.5, deterministic=False)(x)
        x = nn.relu(nn.Dense(width)(x))
    return nn.Dense(classes)(x)


class AlexNet(nn.Module):
    """Class logits of images [B, 224, 224, 3] (Krizhevsky 2014, one column)."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(64, (11, 11), 4, padding=2)(x))
        x = nn.relu(nn.Conv(192, (5, 5))(nn.max_pool(x, *POOL)))
        x = nn.max_pool(x, *POOL)
        for width in (384, 256, 256):
            x = nn.relu(nn.Conv(width, (3, 3))(x))
        return classifier(nn.max_pool(x, *POOL))


class VGG(nn.Module):
    """Class logits of images [B, 224, 224, 3] (Simonyan and Zisserman 2014, table 1).

    `stages` are the numbers of convolutions at each resolution.
    """

    stages: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        for stage, convolutions in enumerate(self.stages):
            for _ in range(convolutions):
                x = nn.relu(nn.Conv(min(64 * 2**stage, 512), (3, 3))(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return classifier(x)


class ConvNorm(nn.Module):
    """A convolution without bias, batch norm, and an activation if there is one."""

    features: int
    kernel: int = 1
    stride: int = 1
    depthwise: bool = False
    act: Callable | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(
            self.features,
            (self.kernel, self.kernel),
            self.stride,
            padding=self.kernel // 2,
            use_bias=False,
            feature_group_count=self.features if self.depthwise else 1,
        )(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
        return self.act(x) if self.act else x


class SqueezeExcite(nn.Module):
    """Channels scaled by what the mean of all says (Hu et al. 2017)."""

    width: int

    @nn.compact
    def __call__(self, x):
        scale = nn.Dense(self.width)(x.mean((1, 2), keepdims=True))
        return x * nn.sigmoid(nn.Dense(x.shape[-1])(nn.silu(scale)))


class InvertedResidual(nn.Module):
    """1x1 to `expand` times as many channels, depthwise, 1x1 (Sandler et al. 2018).

    `drop` is the probability to skip the block (stochastic depth), an image at a time.
    """

    features: int
    expand: int
    kernel: int
    stride: int
    act: Callable
    excite: bool = False
    drop: float = 0.0

    @nn.compact
    def __call__(self, x):
        y, width = x, self.expand * x.shape[-1]
        if self.expand > 1:
            y = ConvNorm(width, act=self.act)(y)
        y = ConvNorm(width, self.kernel, self.stride, True, self.act)(y)
        if self.excite:
            y = SqueezeExcite(max(1, x.shape[-1] // 4))(y)
        y = ConvNorm(self.features)(y)
        if x.shape != y.shape:
            return y
        skip = nn.Dropout(self.drop, broadcast_dims=(1, 2, 3), deterministic=False)
        return x + skip(y)


class InvertedResiduals(nn.Module):
    """Class logits of images [B, 224, 224, 3].

    `stages` are (expand, features, blocks, stride of the first, kernel).
    """

    stages: tuple[tuple[int, ...], ...]
    act: Callable
    excite: bool = False
    drop: float = 0.0
    layer: type[nn.Module] = InvertedResidual

    @nn.compact
    def __call__(self, x):
        total = sum(blocks for _, _, blocks, _, _ in self.stages)
        make = functools.partial(self.layer, act=self.act, excite=self.excite)
        x = ConvNorm(32, 3, 2, act=self.act)(x)
        number = 0
        for expand, features, blocks, stride, kernel in self.stages:
            for block in range(blocks):
                drop = self.drop * number / total
                step = 1 if block else stride
                x = make(features, expand, kernel, step, drop=drop)(x)
                number += 1
        x = ConvNorm(1280, act=self.act)(x).mean((1, 2))
        return nn.Dense(1000)(nn.Dropout(0.2, deterministic=False)(x))


MOBILENET_V2 = functools.partial(
    InvertedResiduals,
    (
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 32, 3, 2, 3),
        (6, 64, 4, 2, 3),
        (6, 96, 3, 1, 3),
        (6, 160, 3, 2, 3),
        (6, 320, 1, 1, 3),
    ),
    nn.relu6,
)
MNASNET = functools.partial(  # Tan et al. 2018, figure 7
    InvertedResiduals,
    (
        (1, 16, 1, 1, 3),
        (3, 24, 3, 2, 3),
        (3, 40, 3, 2, 5),
        (6, 80, 3, 2, 5),
        (6, 96, 2, 1, 3),
        (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    ),
    nn.relu,
)
EFFICIENTNET_B0 = functools.partial(  # Tan and Le 2019, table 1
    InvertedResiduals,
    (
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 40, 2, 2, 5),
        (6, 80, 3, 2, 3),
        (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    ),
    nn.silu,
    excite=True,
    drop=0.2,
)


def convolved(x, width):
    """Two convolutions of U-Net."""
    for _ in range(2):
        x = nn.relu(nn.Conv(width, (3, 3))(x))
    return x


class UNet(nn.Module):
    """Class logits of each pixel of [B, H, W, 1] (Ronneberger et al. 2015, figure 1).

    With padding, so that what is joined has one size.
    """

    widths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    classes: int = 2

    @nn.compact
    def __call__(self, x):
        skipped: list[Any] = []
        for width in self.widths:
            if skipped:
                x = nn.max_pool(x, (2, 2), (2, 2))
            x = convolved(x, width)
            skipped.append(x)
        skipped.pop()
        for width in reversed(self.widths[:-1]):
            x = nn.ConvTranspose(width, (2, 2), (2, 2))(x)
            x = convolved(jnp.concatenate([skipped.pop(), x], -1), width)
        return nn.Conv(self.classes, (1, 1))(x)
