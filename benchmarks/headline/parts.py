"""Gradients of a part of the parameters: T5, Mistral, BERT; and VeLoRA."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._common import size_and_ms
from benchmarks.headline.claim import Pair, Side
from benchmarks.headline.measured import SDS, estimated
from benchmarks.headline.models import (
    T5,
    LlamaBlocks,
)
from benchmarks.models import frozen as frozen_models
from benchmarks.models.transformers import (
    LLAMA_1B,
    StackConfig,
    abstract_params,
    mean_square,
)
from benchmarks.release import KEY
from jaxmem.nn import linen

# -- T5-base and Mistral-7B, norms alone or everything


MISTRAL = StackConfig(32, 4096, 32, 8, 14_336, 0.0)


def part_gradient(model: nn.Module, x, wanted: Callable, narrow: bool):
    """Peak of the gradient of a part of the parameters, as the paper measures."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.eval_shape(model.init, keys, x)["params"]
    if narrow:
        params = jax.tree.map(lambda p: SDS(p.shape, jnp.bfloat16), params)
    trained, frozen = jaxmem.trainable(params, wanted)

    def loss(params, x, labels, key):
        rngs = {"dropout": jax.random.wrap_key_data(key)}
        logits = model.apply({"params": params}, x, rngs=rngs)
        entropy = optax.softmax_cross_entropy_with_integer_labels
        return entropy(logits.astype(jnp.float32), labels).mean()

    def gradient(trained, frozen, x, labels, key):
        return jaxmem.value_and_grad(loss)(trained, frozen, x, labels, key)

    args = trained, frozen, x, SDS(x.shape[:-1], jnp.int32), KEY
    found = estimated(gradient, *args, target="h100", donate=())
    return size_and_ms(found, "peak_bytes")


def norms(path: str, leaf) -> bool:
    del leaf
    return "norm" in path


def everything(path: str, leaf) -> bool:
    del path, leaf
    return True


def t5(wanted: Callable) -> Pair:
    x = SDS((64, 256, 768), jnp.float32)
    of = functools.partial(part_gradient, x=x, wanted=wanted, narrow=False)
    return of(T5()), of(jaxmem.substitute(T5()))


def mistral(wanted: Callable) -> Pair:
    x = SDS((16, 256, 4096), jnp.bfloat16)
    of = functools.partial(part_gradient, x=x, wanted=wanted, narrow=True)
    model = LlamaBlocks(MISTRAL, classes=5000)
    return of(model), of(jaxmem.substitute(model))


# -- VeLoRA: value and down projections of Llama-1B's blocks


def projected(features: int, *, name: str, **how: Any) -> Any:
    if name not in ("value", "down"):
        return nn.Dense(features, name=name, **how)
    return linen.VeLoRADense(features, groups=32, name=name, **how)


def velora() -> Pair:
    """Temporaries of the loss gradient after `substitute`, with and without VeLoRA."""

    def temp(dense: Callable) -> Side:
        model = jaxmem.substitute(LlamaBlocks(LLAMA_1B, dense), activations="input")
        x = SDS((2, 2048, LLAMA_1B.width), jnp.bfloat16)
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        variables = dict(jax.eval_shape(model.init, keys, x))
        params = variables.pop("params")

        def loss(params, rest, x):
            y = model.apply({"params": params, **rest}, x)
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        gradient = jax.grad(loss)
        found = estimated(gradient, params, variables, x, target="h100", donate=())
        return size_and_ms(found)

    return temp(nn.Dense), temp(projected)


# -- SHERL: the late half of a BERT, which reads merged outputs of the frozen half


EARLY = 6


class LateTuned(nn.Module):
    """The layers of a stack, by the same names, and an adapter before the late ones."""

    config: frozen_models.EncoderConfig

    @nn.compact
    def __call__(self, x):
        c, tiers = self.config, []
        for number in range(c.layers):
            if number == EARLY:
                x = linen.MultiTierAdapter(name="adapter")(tiers)
            layer = frozen_models.EncoderLayer(c, nn.Dense, name=f"layer_{number}")
            x, _ = layer(x, None)
            tiers.append(x)
        return x


def late_half() -> Pair:
    """Gradient of all layers, plain, and of the late half, substituted; compiled."""
    config = frozen_models.EncoderConfig()
    x = SDS((16, 512, config.width), config.dtype)

    def temp(model, wanted, scheduled) -> Side:
        params = abstract_params(model, x)
        trained, frozen = jaxmem.trainable(params, wanted)
        loss = lambda params, x: mean_square(model)(params, x, jax.random.key(0))

        def gradient(trained, frozen, x):
            return jaxmem.value_and_grad(loss)(trained, frozen, x)

        args = trained, frozen, x
        how = {"target": "h100", "donate": (), "scheduled": scheduled}
        return size_and_ms(estimated(gradient, *args, **how))

    late = ["adapter", *(f"layer_{n}" for n in range(EARLY, config.layers))]
    plain = frozen_models.Stack(config, frozen_models.EncoderLayer)
    tuned = jaxmem.substitute(LateTuned(config))
    return temp(plain, everything, False), temp(tuned, late, True)
