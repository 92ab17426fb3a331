"""What the models spread over devices by other ways than their batch alone share.

Each is a `Model`: a loss as its user writes it, the shapes of its parameters, and how
they lie on a mesh. `made` gives the training step: AdamW, the state donated.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.steps.devices import placed
from benchmarks.steps.tiles import BF16, F32, SDS, Made, cross_entropy, weights
from benchmarks.steps.train import train_step


class Sizes(NamedTuple):
    """Of a transformer with `experts` MLPs a layer, where it has experts."""

    layers: int
    width: int
    hidden: int
    heads: int
    words: int
    batch: int
    tokens: int
    experts: int = 8
    micro_batches: int = 8
    dtype: Any = BF16


REAL = Sizes(8, 2048, 4096, 16, 32_000, 16, 2048)
TINY = Sizes(4, 16, 32, 2, 32, 8, 16, dtype=F32)


class Model(NamedTuple):
    """A loss of (parameters, tokens), and where its arrays lie on a mesh."""

    loss: Callable
    params: Any
    spec_of: Callable[[str, Any], P]  # of a name and an array
    batch: P  # how the tokens are spread


def dense(sizes: Sizes):
    """The parameters of Llama-like layers with a tied embedding."""
    layers = weights(sizes.layers, sizes.width, sizes.hidden)
    return {"layers": layers, "table": SDS((sizes.words, sizes.width), F32)}


def by_name(specs: Mapping[str, P]) -> Callable[[str, Any], P]:
    """Parameters, and their moments, that are not named are on every device."""
    return lambda name, x: specs.get(name, P()) if x.ndim > 1 else P()


def pin(mesh, *spec) -> Callable:
    """What holds an array to a sharding."""
    where = NamedSharding(mesh, P(*spec))
    return lambda x: jax.lax.with_sharding_constraint(x, where)


def language_loss(sizes: Sizes, keep: Callable, layers: Callable) -> Callable:
    """The mean cross entropy of the next token, and what `layers` add to it.

    `layers(params, x)` gives its output and the other term of the loss.
    """

    def loss(params, tokens):
        x = keep(params["table"].astype(sizes.dtype)[tokens[:, :-1]])
        x, more = layers(params["layers"], x)
        labels = tokens[:, 1:]
        return cross_entropy(keep(x), params["table"], labels) / labels.size + more

    return loss


def made(model: Model, mesh, sizes: Sizes) -> Made:
    tx = optax.adamw(1e-3)
    state = model.params, jax.eval_shape(tx.init, model.params)
    state = placed(mesh, state, model.spec_of)
    tokens = SDS((sizes.batch, sizes.tokens + 1), jnp.int32)
    tokens = placed(mesh, tokens, lambda *_: model.batch)
    return Made(train_step(model.loss, tx), (state, tokens), (0,))
