"""By name, what the second model of a comparison is made with."""

from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Any

import jax
from flax import linen as nn

import jaxmem
from jaxmem.nn import Rule, linen, substitute
from jaxmem.rewriting import Pattern, library

_MLP = r"(^|/)(up|down)$"


def _approx_bp(model):
    gelu = Pattern("gelu", partial(jax.nn.gelu, approximate=True), jaxmem.ops.regelu2)
    return substitute(model, patterns=(gelu, *library()))


class _Sampled(linen.SampledDense):
    """With keys from the stream that a model splits over its layers anyway.

    Without a key, as in validation, a plain dense layer.
    """

    rng_collection: str = field(default="dropout", kw_only=True)

    @nn.compact
    def __call__(self, inputs, deterministic=None, row_norms=None):
        keyless = not self.has_rng(self.rng_collection)
        return super().__call__(inputs, deterministic or keyless, row_norms)


def _sampled(model):
    # codes of the GELU, whose output would be kept whole for its own derivative
    return substitute(model, [Rule(_MLP, _Sampled)], activations=4)


TECHNIQUES: dict[str, Callable[[Any], Any]] = {
    "exact": substitute,
    **{f"bits-{k}": partial(substitute, activations=k) for k in (1, 2, 3, 4)},
    "regelu2": _approx_bp,
    "storage-8": partial(substitute, save=8),
    "storage-4": partial(substitute, save=4),
    "wta-crs": _sampled,
}
WITH_KEY = ("wta-crs",)  # draw random numbers in every step
IN_LINEN = ("wta-crs",)  # change a class in a way that an nnx object's state forbids
