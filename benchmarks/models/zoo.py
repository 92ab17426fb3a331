"""The zoo: training steps of well-known models, as shapes alone.

`step(name, batch, scanned)` gives one Adam step and its arguments, without an array
being made: the largest can be traced on a small machine. Parameters, moments and
statistics are float32; vision nets compute in float32, transformers in bfloat16.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.models import zoo_vision as vision
from benchmarks.models.transformers import LLAMA_1B, BertConfig, StackConfig
from benchmarks.models.vision import ResNet, ResNetConfig, ViT, ViTConfig
from benchmarks.models.zoo_transformers import (
    GPT2,
    Llama,
    MaskedBert,
    MixtralLayer,
    OneHotMixtralLayer,
    Whisper,
)

SDS = jax.ShapeDtypeStruct
KEY = SDS((2,), jnp.uint32)
OPTIMIZER = optax.adam(1e-3)


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
      make: `make(scanned)` is the linen module.
      parameters: how many were published.
      shape: of one input; integers (tokens) if it has one dimension, else numbers.
      layered: whether its layers can be scanned.
      target: shape of what a decoder is given beside its input, tokens; none without.
    """

    make: Callable[[bool], nn.Module]
    parameters: int
    shape: tuple[int, ...]
    layered: bool = True
    target: tuple[int, ...] = ()

    def inputs(self, batch: int) -> Any:
        """Shape and dtype of a batch of inputs."""
        dtype = jnp.int32 if len(self.shape) == 1 else jnp.float32
        own = SDS((batch, *self.shape), dtype)
        return (own, SDS((batch, *self.target), jnp.int32)) if self.target else own


def _images(make: Callable[[], nn.Module], parameters: int, size=224, channels=3):
    return Entry(lambda _: make(), parameters, (size, size, channels), layered=False)


def _resnet(stages, parameters):
    return _images(lambda: ResNet(ResNetConfig(stages, dtype=jnp.float32)), parameters)


def _vit(config: ViTConfig, parameters: int):
    make = lambda scanned: ViT(config, scanned=scanned)
    return Entry(make, parameters, (224, 224, 3))


def _bert(layers, width, heads, parameters):
    config = BertConfig(layers, width, heads, 4 * width)
    return Entry(lambda scanned: MaskedBert(config, scanned), parameters, (512,))


def _gpt2(layers, width, heads, parameters):
    config = StackConfig(layers, width, heads, heads, 4 * width)
    return Entry(lambda scanned: GPT2(config, scanned), parameters, (1024,))


LLAMA3_8B = StackConfig(32, 4096, 32, 8, 14336, dropout=0.0)
QWEN3_4B = StackConfig(36, 2560, 32, 8, 9728, dropout=0.0, head=128, qk_norm=True)
GEMMA_2B = StackConfig(18, 2048, 8, 1, 16384, dropout=0.0, head=256, gate=nn.gelu)
WHISPER = StackConfig(32, 1280, 20, 20, 5120, dropout=0.0)


def decoder(config: StackConfig, words: int, parameters: int, length=2048, tied=False):
    """A transformer of Llama's kind."""
    make = lambda scanned: Llama(config, scanned, vocabulary=words, tied=tied)
    return Entry(make, parameters, (length,))


def _mixtral(layer):
    make = lambda scanned: Llama(LLAMA3_8B, scanned, layer, vocabulary=32_000)
    return Entry(make, 46_702_792_704, (2048,))


# Parameters as in torchvision and Hugging Face transformers. ViT-B there has one more
# token, which ours, with the mean of the tokens, does without: 2 x 768 fewer. Whisper's
# keys have no biases there, and the places of its encoder are parameters.
ZOO = {
    "alexnet": _images(vision.AlexNet, 61_100_840),
    "vgg16": _images(lambda: vision.VGG((2, 2, 3, 3, 3)), 138_357_544),
    "vgg19": _images(lambda: vision.VGG((2, 2, 4, 4, 4)), 143_667_240),
    "mnasnet": _images(vision.MNASNET, 4_383_312),
    "mobilenet_v2": _images(vision.MOBILENET_V2, 3_504_872),
    "efficientnet_b0": _images(vision.EFFICIENTNET_B0, 5_288_548),
    "resnet50": _resnet((3, 4, 6, 3), 25_557_032),
    "resnet101": _resnet((3, 4, 23, 3), 44_549_160),
    "unet": _images(vision.UNet, 31_030_658, 512, 1),
    "vit_b": _vit(ViTConfig(), 86_567_656 - 2 * 768),
    "vit_l": _vit(ViTConfig(24, 1024, 16, 4096), 304_326_632 - 2 * 1024),
    "bert_base": _bert(12, 768, 12, 109_514_298),
    "bert_large": _bert(24, 1024, 16, 335_174_458),
    "gpt2_small": _gpt2(12, 768, 12, 124_439_808),
    "gpt2_medium": _gpt2(24, 1024, 16, 354_823_168),
    "gpt2_large": _gpt2(36, 1280, 20, 774_030_080),
    "gpt2_xl": _gpt2(48, 1600, 25, 1_557_611_200),
    "llama3_1b": decoder(LLAMA_1B, 128_256, 1_235_814_400, tied=True),
    "llama3_8b": decoder(LLAMA3_8B, 128_256, 8_030_261_248),
    "qwen3_4b": decoder(QWEN3_4B, 151_936, 4_022_468_096, tied=True),
    "gemma_2b": decoder(GEMMA_2B, 256_000, 2_506_172_416, tied=True),
    "whisper_large_v3": Entry(
        lambda scanned: Whisper(WHISPER, scanned),
        1_543_490_560 + (3 * 32 - 1500) * 1280,
        (3000, 128),
        target=(448,),
    ),
    "mixtral_8x7b": _mixtral(MixtralLayer),
    "mixtral_8x7b_one_hot": _mixtral(OneHotMixtralLayer),
}


def entry(name: str) -> Entry:
    """The entry of this name; ValueError names those there are."""
    if name not in ZOO:
        raise ValueError(f"name={name!r}: the zoo has {', '.join(ZOO)}")
    return ZOO[name]


def abstract(model: nn.Module, inputs, tx) -> tuple[Any, Any]:
    """The state (parameters, batch statistics, moments) and the logits, as shapes."""

    def init(x, key):
        logits, variables = model.init_with_output({"params": key, "dropout": key}, x)
        params = variables.pop("params")
        return (params, variables, tx.init(params)), logits

    return jax.eval_shape(init, inputs, jax.random.key(0))


def loss_of(model: nn.Module) -> Callable:
    """The mean cross entropy, and new statistics, of a batch as `train_step` has it."""

    def loss(params, statistics, inputs, labels, key):
        variables = {"params": params, **statistics}
        rngs = {"dropout": jax.random.wrap_key_data(key)}
        logits, new = model.apply(variables, inputs, rngs=rngs, mutable=["batch_stats"])
        entropy = optax.softmax_cross_entropy_with_integer_labels
        return entropy(logits.astype(jnp.float32), labels).mean(), new

    return loss


def train_step(model: nn.Module, tx, wrap=lambda loss: loss):
    """Adam on the mean cross entropy, as a user writes it; `wrap` changes the loss."""
    loss = loss_of(model)

    def step(state, inputs, labels, key):
        params, statistics, moments = state
        gradient = jax.value_and_grad(wrap(loss), has_aux=True)
        (value, new), grads = gradient(params, statistics, inputs, labels, key)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), new, moments), value

    return step


def step(name: str, batch: int = 1, scanned: bool = False, policy=None):
    """A training step of the zoo.

    Args:
      name: a key of `ZOO`.
      batch: how many images or sequences.
      scanned: the layers in one `nn.scan`; else one after another.
      policy: of `jax.checkpoint_policies`, for each layer or block; for the whole loss
        where a model has none.

    Returns:
      The step, its abstract arguments (state, inputs, labels, key data), and which of
      them to donate.

    Raises:
      ValueError: a name that the zoo does not have, a batch under 1, or a model to be
        scanned that is no stack of equal layers.
    """
    found = entry(name)
    if batch < 1:
        raise ValueError(f"batch={batch}: at least 1")
    if scanned and not found.layered:
        raise ValueError(f"scanned=True: {name} is no stack of equal layers")
    model, inputs, tx = found.make(scanned), found.inputs(batch), OPTIMIZER
    model, wrap = under(model, policy)
    state, logits = abstract(model, inputs, tx)
    labels = SDS(logits.shape[:-1], jnp.int32)
    return train_step(model, tx, wrap), (state, inputs, labels, KEY), (0,)


def under(model: nn.Module, policy) -> tuple[nn.Module, Callable]:
    """A model with each layer under a policy, and what to do to its loss instead."""
    same = lambda loss: loss
    if policy is None:
        return model, same
    own = [name for name in ("layer", "cross") if hasattr(model, name)]
    if not own:
        return model, functools.partial(jax.checkpoint, policy=policy)
    layers = {name: nn.remat(getattr(model, name), policy=policy) for name in own}
    return model.clone(**layers), same
