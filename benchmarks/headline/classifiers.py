"""Few bits, sampled and projected layers in RoBERTa, BERT, DeiT-B and ViT-B."""

import functools

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks.headline.claim import Pair, Side
from benchmarks.headline.measured import SDS, peak
from benchmarks.headline.models import (
    ImageClassifier,
    Parts,
    Sizes,
    TextClassifier,
)
from jaxmem import ops
from jaxmem.nn import linen

# -- text


def parts_of_text(parts: Parts, batch: int) -> Side:
    return peak(TextClassifier(Sizes(), parts), _tokens(batch), "a100")


def lean_text(batch: int, parts: Parts | None = None, **how) -> Side:
    """Substituted and scheduled."""
    model = jaxmem.substitute(TextClassifier(Sizes(), parts or Parts()), **how)
    return peak(model, _tokens(batch), "a100", scheduled=True)


def _tokens(batch: int) -> jax.ShapeDtypeStruct:
    return SDS((batch, 128), jnp.int32)


def gelu_of(bits: int | str) -> Parts:
    return Parts(act=functools.partial(ops.gelu, approximate=False, save=bits))


def sampled(budget: float, bits: int) -> Parts:
    dense = functools.partial(
        linen.SampledDense, budget=budget, rng_collection="dropout"
    )
    return Parts(dense, gelu_of(bits).act)


def gelu_alone() -> Pair:
    return parts_of_text(Parts(), 128), parts_of_text(gelu_of(3), 128)


def gelu_and_projections() -> Pair:
    return parts_of_text(Parts(), 128), parts_of_text(sampled(0.2, 3), 128)


def exact_roberta() -> Pair:
    return parts_of_text(Parts(), 128), lean_text(128)


def winner_take_all() -> Pair:
    own = lean_text(100, sampled(0.3, 4), activations=4)
    return parts_of_text(Parts(), 100), own


# -- images


def parts_of_image(parts: Parts, batch: int, scheduled: bool = False) -> Side:
    return peak(ImageClassifier(parts=parts), _images(batch), "a100", scheduled)


def lean_image(batch: int, **how) -> Side:
    """Substituted and scheduled."""
    model = jaxmem.substitute(ImageClassifier(parts=Parts()), **how)
    return peak(model, _images(batch), "a100", scheduled=True)


def _images(batch: int) -> jax.ShapeDtypeStruct:
    return SDS((batch, 224, 224, 3), jnp.float32)


def mesa() -> Pair:
    return parts_of_image(Parts(), 128), lean_image(128, save=8)


def mesa_exact() -> Pair:
    return parts_of_image(Parts(), 128), lean_image(128)


def approximated() -> Pair:
    """ReGELU2 and MS norms, and nothing else."""
    parts = Parts(linen.Dense, ops.regelu2, linen.MSLayerNorm)
    return parts_of_image(Parts(), 64), parts_of_image(parts, 64, scheduled=True)
