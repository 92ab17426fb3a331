"""Models that nobody here wrote, each as a loss in one form, with its training step.

The families are in `foreign_transformers.py`, `foreign_equinox.py`, `foreign_haiku.py`
and `foreign_tunix.py`, a library each; they need the extra `foreign`. All are built
from configurations with random parameters: nothing is downloaded.
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem.nn import SubstitutionReport

Tree = Any
OPTIMIZER = optax.adam(1e-3)
KEY = np.asarray([0, 7], np.uint32)


@dataclass(frozen=True)
class Size:
    """What all families are built from.

    Attributes:
      layers: of an encoder, a decoder, or both.
      width: of the residual stream; the MLP is four times as wide.
      heads: of attention.
      length: tokens of a sequence.
      batch: sequences or images.
      vocabulary: tokens there are.
      image: pixels of an image's side.
      dtype: of the computation; parameters are float32 where the model lets them.
    """

    layers: int
    width: int
    heads: int
    length: int
    batch: int
    vocabulary: int
    image: int
    dtype: Any


SMALL = Size(2, 32, 4, 16, 2, 64, 32, jnp.float32)  # for values, on a CPU
REAL = Size(2, 512, 8, 128, 8, 8192, 224, jnp.bfloat16)  # for bytes

# (params, statistics, batch, key; None for no dropout) -> (loss, new statistics)
Loss = Callable[[Tree, Tree, Tree, Any], tuple[jax.Array, Tree]]


@dataclass(frozen=True)
class Model:
    """A model as its own library runs it, and as `jaxmem.substitute` makes it.

    Attributes:
      init: gives parameters and statistics (of batch norms; else empty) from a key.
      loss: of the plain model.
      lean: the same of the substituted one.
      report: `jaxmem.nn.report` of the substituted one, from parameters, statistics
        and batch.
      batch: inputs and "labels", as arrays.
    """

    init: Callable[[Any], tuple[Tree, Tree]]
    loss: Loss
    lean: Loss
    report: Callable[[Tree, Tree, Tree], SubstitutionReport]
    batch: dict[str, np.ndarray]


def tokens(size: Size, seed: int = 0) -> np.ndarray:
    """Random tokens [B, S], int32; 0 to 3 are left out, which often mean padding."""
    shape, random = (size.batch, size.length), np.random.default_rng(seed)
    return random.integers(4, size.vocabulary, shape, np.int32)


def images(size: Size) -> np.ndarray:
    """Random images [B, H, W, 3], float32."""
    shape = (size.batch, size.image, size.image, 3)
    return np.random.default_rng(1).standard_normal(shape, np.float32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over all labels, in float32."""
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return entropy(logits.astype(jnp.float32), labels).mean()


def train_step(loss: Loss) -> Callable:
    """`step(state, batch, key) -> (state, loss)`: Adam, as a user writes it."""

    def step(state, batch, key):
        params, statistics, moments = state
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, statistics), grads = gradient(params, statistics, batch, key)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        return (optax.apply_updates(params, updates), statistics, moments), value

    return step


def state(model: Model, seed: int = 0) -> Tree:
    """Parameters, statistics and moments; under `jax.eval_shape` their shapes."""
    params, statistics = jax.jit(model.init)(jax.random.key(seed))
    return params, statistics, OPTIMIZER.init(params)


LIBRARIES = ("transformers", "equinox", "haiku", "tunix")


def _library(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.models.foreign_{name}")


def families(libraries: Iterable[str] = LIBRARIES) -> list[tuple[str, str]]:
    """Library and name of every family; imports the libraries."""
    return [(lib, name) for lib in libraries for name in _library(lib).FAMILIES]


def build(library: str, family: str, size: Size) -> Model:
    """The model of one family."""
    return _library(library).build(family, size)
