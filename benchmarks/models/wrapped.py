"""Models whose products have no names: a checkpoint policy for each block.

A loss gradient and its arguments, with the blocks as a user would wrap them, by
`nn.remat` or `jax.checkpoint` in one line. No policy: the model as it is.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.headline.replay import lstm_loss
from benchmarks.models.vision import Bottleneck, ResNet, ResNetConfig
from tests.programs import diffusion, graph_net

F32 = jnp.float32
SDS = jax.ShapeDtypeStruct


def under(policy, of, remat):
    """A block under a policy; `remat`: `nn.remat` or `jax.checkpoint`."""
    return of if policy is None else remat(of, policy=policy)


def gradient_of(model: nn.Module, *inputs):
    """Of the mean square of what a model gives, whose statistics are updated."""

    def loss(params, statistics, *inputs):
        variables = {"params": params, **statistics}
        y, new = model.apply(variables, *inputs, mutable=["batch_stats"])
        return jnp.mean(jnp.square(y.astype(F32))), new

    statistics = dict(jax.eval_shape(model.init, jax.random.key(0), *inputs))
    params = statistics.pop("params")
    return jax.grad(loss, has_aux=True), (params, statistics, *inputs)


def resnet(policy, stages=(3, 4, 6, 3), width=64, batch=128, side=224):
    """ResNet-50 in bfloat16, each bottleneck under the policy."""
    layer = under(policy, Bottleneck, nn.remat)
    model = ResNet(ResNetConfig(stages, width), layer=layer)
    return gradient_of(model, SDS((batch, side, side, 3), F32))


class AttentionBlock(diffusion.Block):
    """Attention after the convolutions, where there are few enough pixels."""

    largest: int = 32
    heads: int = 4

    @nn.compact
    def __call__(self, x, level):
        x = diffusion.Block(self.width)(x, level)
        batch, side, _, width = x.shape
        if side > self.largest:
            return x
        y = nn.GroupNorm(num_groups=4)(x).reshape(batch, side**2, width)
        y = nn.MultiHeadDotProductAttention(self.heads)(y)
        return x + y.reshape(x.shape)


def unet(policy, width=128, batch=64, side=64):
    """A denoiser with attention, each block under the policy."""
    model = diffusion.UNet(width, under(policy, AttentionBlock, nn.remat))
    return gradient_of(model, SDS((batch, side, side, 3), F32), SDS((batch,), F32))


def lstm(policy, chunk=1, steps=4096, batch=64, width=512):
    """An LSTM in `lax.scan`, each so many steps of it under the policy.

    More than one step: a scan in a scan.
    """

    def wrap(body):
        scanned = functools.partial(jax.lax.scan, body)
        return under(policy, body if chunk == 1 else scanned, jax.checkpoint)

    loss, weights = lstm_loss(batch, width, wrap)
    times = (steps,) if chunk == 1 else (steps // chunk, chunk)
    return jax.grad(loss), (weights, SDS((*times, batch, width), F32))


def graph(policy, size="big"):
    """The graph network of `tests.programs`, each round under the policy."""
    exchange = under(policy, graph_net.exchange, jax.checkpoint)
    loss = functools.partial(graph_net.loss, exchange=exchange)
    _, ((params, _), *batch), _ = graph_net.make(size)
    return jax.grad(loss), (params, *batch)
