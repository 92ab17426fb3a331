"""By name, what the two runs of a comparison are made of, and what they train."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

import jaxmem
from jaxmem.demo import _losses
from jaxmem.nn import Rule, linen, substitute
from jaxmem.nn import nnx as lean_nnx
from jaxmem.rewriting import Pattern, library

_APPROXIMATE = "gradients are approximate by design: the losses agree in the long run"


@dataclass(frozen=True)
class Technique:
    """How the second run differs from the first.

    Attributes:
        change: makes the second model of the first.
        loss: the second run's, of its forward pass.
        first: makes the first model of the GPT.
        trains: what is trained in both runs, as for `jaxmem.trainable`.
        halves: whether the lower half of the layers is a stack of its own.
        draws: whether a step draws random numbers.
        in_linen: whether the model must be one of linen, whose layers can be exchanged
            for others with other variables.
        note: what to tell of the losses.
    """

    change: Callable[[Any], Any] = substitute
    loss: Callable[[Callable], Callable] = _losses.from_logits
    first: Callable[[Any], Any] = lambda model: model
    trains: Any = True
    halves: bool = False
    draws: bool = False
    in_linen: bool = False
    note: str = ""


def _with_gelu(op):
    gelu = Pattern("gelu", _gelu, op)
    return partial(substitute, patterns=(gelu, *library()))


def _gelu(x):
    return jax.nn.gelu(x, approximate=True)


class _Sampled(linen.SampledDense):
    """With keys from the stream that a model splits over its layers anyway.

    Without a key, as in validation, a plain dense layer.
    """

    rng_collection: str = field(default="dropout", kw_only=True)

    @nn.compact
    def __call__(self, inputs, deterministic=None, row_norms=None):
        keyless = not self.has_rng(self.rng_collection)
        return super().__call__(inputs, deterministic or keyless, row_norms)


class _LoRA(nn.Dense):
    """LoRA as one writes it."""

    rank: int = 8

    @nn.compact
    def __call__(self, inputs):
        y = super().__call__(inputs)
        shapes = (inputs.shape[-1], self.rank), (self.rank, self.features)
        a = self.param("lora_a", nn.initializers.he_uniform(), shapes[0])
        b = self.param("lora_b", nn.initializers.zeros, shapes[1])
        return y + inputs @ a @ b


class _BatchNormGELU(nn.Module):
    """A GELU after a batch norm with the batch's own statistics."""

    @staticmethod
    def normed(x, scale, bias):
        x = jax.nn.standardize(x, axis=(0, 1))
        return nn.gelu(x * scale[None, None] + bias[None, None])

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        return self.normed(x, scale, bias)


class _InPlaceABN(_BatchNormGELU):
    """The same, that keeps its output alone."""

    @staticmethod
    def normed(x, scale, bias):
        return jaxmem.ops.inplace_abn(x, scale, bias, activation="gelu")[0]


def _in_mlp(dense):
    return lambda model: model.clone(dense=dense)


def _keeping_a_part(dense):
    """Its input is kept by nobody else: codes of the GELU in place of its output."""
    return lambda model: substitute(_in_mlp(dense)(model), activations=4)


def _ms_norm(model):
    if isinstance(model, nn.Module):
        return substitute(model, [Rule(nn.LayerNorm, linen.MSLayerNorm)])
    return substitute(model, [Rule(nnx.LayerNorm, lean_nnx.MSLayerNorm)])


def _headless(model):
    return substitute(model, [Rule("^head$", lambda head: lambda hidden: hidden)])


def _approximate(change, **options) -> Technique:
    return Technique(change, note=_APPROXIMATE, **options)


TECHNIQUES = {
    "exact": Technique(),
    **{
        f"bits-{k}": _approximate(partial(substitute, activations=k))
        for k in (1, 2, 3, 4)
    },
    "regelu2": _approximate(_with_gelu(jaxmem.ops.regelu2)),
    "elementwise": Technique(_with_gelu(jaxmem.ops.elementwise(_gelu))),
    "ms-norm": Technique(_ms_norm),
    "inplace-abn": Technique(
        lambda model: substitute(model.clone(activation=_InPlaceABN)),
        first=lambda model: model.clone(activation=_BatchNormGELU),
        in_linen=True,
        note="in both runs the MLPs have a batch norm before their GELU, which sees "
        "bytes to come: the loss is none of a language model",
    ),
    "storage-8": _approximate(partial(substitute, save=8)),
    "storage-4": _approximate(partial(substitute, save=4)),
    "wta-crs": _approximate(_keeping_a_part(_Sampled), draws=True, in_linen=True),
    "velora": _approximate(
        _keeping_a_part(partial(linen.VeLoRADense, groups=16)), in_linen=True
    ),
    "linear-cross-entropy": Technique(_headless, _losses.from_hidden),
    "frozen": Technique(
        partial(substitute, activations="auto"),
        trains=["blocks", "norm", "head"],
        halves=True,
        note="both runs train the upper half of the layers, the last norm and the head",
    ),
    "lora": Technique(
        partial(substitute, rules=[Rule(_LoRA, linen.LoRADense)], activations="auto"),
        first=_in_mlp(_LoRA),
        trains=["**/lora_*", "norm", "head"],
        in_linen=True,
        note="both runs train adapters of the MLPs, the last norm and the head; the "
        "rest is as initialised",
    ),
}
