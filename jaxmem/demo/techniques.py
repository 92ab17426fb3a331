"""By name, what the two runs of a comparison are made of, and what they train."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import optax
from flax import linen as nn
from flax import nnx

import jaxmem
from jaxmem.nn import Rule, linen, substitute
from jaxmem.nn import nnx as lean_nnx
from jaxmem.rewriting import Pattern, library

_APPROXIMATE = "gradients are approximate by design: the losses agree in the long run"


def loss_from_logits(forward: Callable) -> Callable:
    """`loss(params, tokens, key)` in nats a byte, as users write it.

    Dropout acts in `forward(params, tokens, key)` if there is a key.
    """

    def loss(params, tokens, key=None):
        logits = forward(params, tokens[:, :-1], key)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    return loss


def loss_from_hidden(forward: Callable) -> Callable:
    """As `loss_from_logits`, for a forward pass without the head."""
    # The logits never exist as a whole.

    def loss(params, tokens, key=None):
        hidden = forward(params, tokens[:, :-1], key)
        head = params["head"]  # of arrays in linen, of Variables in nnx
        weights = head["kernel"][...], tokens[:, 1:], head["bias"][...]
        # By default a vocabulary of 256 is too small to be divided into blocks.
        return jaxmem.ops.linear_cross_entropy(hidden, *weights, block_size=64)

    return loss


@dataclass(frozen=True)
class Technique:
    """How the second run differs from the first.

    Attributes:
        change: makes the second model of the first.
        loss: makes the second run's loss of its forward pass.
        first: makes the first model of the GPT.
        trains: what is trained in both runs, as for `jaxmem.trainable`.
        halves: whether the lower half of the layers is a stack of its own.
        draws: whether a step draws random numbers.
        in_linen: whether the model must be one of linen, in which layers can be
            exchanged for others with other variables.
        note: a remark about the losses.
    """

    change: Callable[[Any], Any] = substitute
    loss: Callable[[Callable], Callable] = loss_from_logits
    first: Callable[[Any], Any] = lambda model: model
    trains: Any = True
    halves: bool = False
    draws: bool = False
    in_linen: bool = False
    note: str = ""


def _gelu(x):
    return jax.nn.gelu(x, approximate=True)


def _with_gelu(op):
    patterns = Pattern("gelu", _gelu, op), *library()
    return partial(substitute, patterns=patterns)


class _Sampled(linen.SampledDense):
    """Takes keys from the stream that a model splits over its layers anyway.

    Without a key, as in validation, it is a plain dense layer.
    """

    rng_collection: str = field(default="dropout", kw_only=True)

    @nn.compact
    def __call__(self, inputs, deterministic=None, row_norms=None, sample_ids=None):
        keyless = not self.has_rng(self.rng_collection)
        return super().__call__(inputs, deterministic or keyless, row_norms, sample_ids)


class _LoRA(nn.Dense):
    """LoRA as users write it."""

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

    lean: bool = False

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        if self.lean:
            return jaxmem.ops.inplace_abn(x, scale, bias, activation="gelu")[0]
        x = jax.nn.standardize(x, axis=(0, 1))
        return nn.gelu(x * scale[None, None] + bias[None, None])


def _with_dense(dense):
    """Its input is saved by nothing else: the GELU saves codes, not its output."""
    return lambda model: substitute(model.clone(dense=dense), activations=4)


def _ms_norm(model):
    if isinstance(model, nn.Module):
        return substitute(model, [Rule(nn.LayerNorm, linen.MSLayerNorm)])
    return substitute(model, [Rule(nnx.LayerNorm, lean_nnx.MSLayerNorm)])


def _headless(model):
    return substitute(model, [Rule("^head$", lambda head: lambda hidden: hidden)])


_approximate = partial(Technique, note=_APPROXIMATE)

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
        lambda model: substitute(model.clone(activation=partial(_BatchNormGELU, True))),
        first=lambda model: model.clone(activation=_BatchNormGELU),
        in_linen=True,
        note="in both runs the MLPs have a batch norm before their GELU, which sees "
        "bytes to come: the loss is none of a language model",
    ),
    "storage-8": _approximate(partial(substitute, save=8)),
    "storage-float8": _approximate(partial(substitute, save="float8_e4m3fn")),
    "storage-4": _approximate(partial(substitute, save=4)),
    "wta-crs": _approximate(_with_dense(_Sampled), draws=True, in_linen=True),
    "velora": _approximate(
        _with_dense(partial(linen.VeLoRADense, groups=16)), in_linen=True
    ),
    "linear-cross-entropy": Technique(_headless, loss_from_hidden),
    "frozen": Technique(
        partial(substitute, activations="auto"),
        trains=["blocks", "norm", "head"],
        halves=True,
        note="both runs train the upper half of the layers, the last norm and the head",
    ),
    "lora": Technique(
        partial(substitute, rules=[Rule(_LoRA, linen.LoRADense)], activations="auto"),
        first=lambda model: model.clone(dense=_LoRA),
        trains=["**/lora_*", "norm", "head"],
        in_linen=True,
        note="both runs train adapters of the MLPs, the last norm and the head; the "
        "rest is as initialised",
    ),
}
