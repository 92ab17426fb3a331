"""In-place activated batch norm in ResNet-101."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._common import MIB, size_and_ms
from benchmarks.headline.claim import Pair, Side
from benchmarks.headline.measured import SDS, estimated
from benchmarks.headline.models import (
    LeakyResNet,
)
from benchmarks.models import zoo
from jaxmem.nn import linen


def in_place(act: bool, dtype: Any, name: str):
    kind = "leaky_relu" if act else "identity"
    how = {"activation": kind, "momentum": 0.9, "dtype": dtype, "name": name}
    return linen.InPlaceABN(False, **how)


def resnet_gradient(normed: Callable | None):
    model = LeakyResNet(normed=normed) if normed else LeakyResNet()
    images = SDS((64, 224, 224, 3), jnp.float32)
    state, logits = zoo.abstract(model, images, optax.identity())
    labels = SDS(logits.shape[:-1], jnp.int32)

    def gradient(params, statistics, images, labels):
        def loss(params):
            variables = {"params": params, **statistics}
            logits, new = model.apply(variables, images, mutable=["batch_stats"])
            entropy = optax.softmax_cross_entropy_with_integer_labels
            return entropy(logits.astype(jnp.float32), labels).mean(), new

        return jax.grad(loss, has_aux=True)(params)

    return gradient, (*state[:2], images, labels)


def inplace_abn_kept() -> Pair:
    """What the loss keeps for its gradient, as JAX alone would have it."""

    def kept(normed) -> float:
        model = LeakyResNet(normed=normed) if normed else LeakyResNet()
        _, (params, statistics, images, _) = resnet_gradient(normed)

        def loss(params, statistics, images):
            variables = {"params": params, **statistics}
            logits, _ = model.apply(variables, images, mutable=["batch_stats"])
            return logits.astype(jnp.float32).sum()

        args = params, statistics, images
        return jaxmem.residuals(loss, *args, argnums=0).total_bytes / MIB

    return (kept(None), None), (kept(in_place), None)


def inplace_abn_compiled() -> Pair:
    def temp(normed, scheduled: bool) -> Side:
        gradient, args = resnet_gradient(normed)
        how = {"target": "h100", "donate": (), "scheduled": scheduled}
        return size_and_ms(estimated(gradient, *args, **how))

    return temp(None, False), temp(in_place, True)
