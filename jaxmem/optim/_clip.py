"""Clipping by the norm of a layer's gradient.

A global norm is known only after the whole gradient, a layer's norm right after the
gradient of that layer. So this clipping lets an optimizer take in each layer's gradient
inside the backward pass.
"""

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jaxmem._checks import check_scalar
from jaxmem._paths import check_selection, selection
from jaxmem.optim.accumulation.dtypes import accumulation_dtype

_STACKED = "clip_by_layer_norm: stacked"


def clip_by_layer_norm(
    max_norm: ArrayLike, stacked: Any = None
) -> optax.GradientTransformation:
    """Scales down each layer's gradient to a norm of at most `max_norm`.

    A layer is a top-level child of the tree: all its leaves share one norm. Leaves that
    a scan over layers has stacked along axis 0 form a layer for each index of that
    axis, with all stacked leaves of the same top-level child. Unlike
    `optax.clip_by_global_norm` this may change the direction of the whole gradient; a
    bound on its norm is `max_norm` times the square root of the number of layers.

    Args:
      max_norm: scalar, more than 0.
      stacked: which leaves are stacked, by default none: patterns of paths as
        `jaxmem.trainable` takes them ("layers", ``"decoder/layers/**"``, a compiled
        regular expression), a function of the leaf's path ("decoder/layers/kernel"), a
        list of these; or a tree of bools, of the parameters' structure or a
        prefix of it.

    Returns:
      An `optax.GradientTransformation` without state. Norms are computed in float32 or
      wider, updates keep their dtypes. For stacked leaves it reduces over all axes but
      the first.

    Raises:
      TypeError: `stacked` is none of these.
      ValueError: `max_norm` not positive; from `update`, a pattern that matches no
        leaf, stacked leaves without an axis 0, or of one top-level child with several
        sizes of it.

    Source:
      Pascanu et al., "On the difficulty of training recurrent neural networks",
      arXiv 1211.5063, section 3.2, layer by layer.
    """
    check_scalar("max_norm", max_norm, above=0)
    check_selection(_STACKED, stacked)

    def update(updates, state, params=None):
        del params
        leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
        stacks = _stacks(stacked, updates)
        layers = defaultdict(list)
        for i, ((path, _), stack) in enumerate(zip(leaves, stacks, strict=True)):
            layers[jax.tree_util.keystr(path[:1]), stack].append(i)
        clipped: list[Any] = [None] * len(leaves)
        with jax.named_scope("jaxmem.clip_by_layer_norm"):
            for (name, stack), places in layers.items():
                group = [leaves[i][1] for i in places]
                scaled = _clipped(group, stack, max_norm, name)
                for i, x in zip(places, scaled, strict=True):
                    clipped[i] = x
        return jax.tree.unflatten(tree, clipped), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _stacks(stacked, updates) -> list[bool]:
    if stacked is None:
        return [False] * len(jax.tree.leaves(updates))
    return selection(_STACKED, stacked, updates)


def _clipped(group: list, stack: bool, max_norm, name: str) -> list:
    """The leaves of one layer, or of one stack of layers, scaled down alike."""
    sizes = {x.shape[:1] for x in group}
    if stack and (len(sizes) > 1 or () in sizes):
        shapes = ", ".join(str(x.shape) for x in group)
        raise ValueError(
            f"stacked leaves of {name or 'the tree'} have shapes {shapes}: they need "
            "an axis 0 of one size, the layers"
        )
    dtype = accumulation_dtype(*group)
    squares = [_square_sum(x.astype(dtype), stack) for x in group]
    norm = jnp.sqrt(sum(squares[1:], squares[0]))
    limit = jnp.asarray(max_norm, dtype)
    factor = limit / jnp.maximum(norm, limit)  # 1 to the bit within the limit
    return [_scaled(x, factor, dtype) for x in group]


def _square_sum(x, stack: bool):
    axes = tuple(range(1 if stack else 0, x.ndim))
    return jnp.sum(jnp.square(x), axis=axes)


def _scaled(x, factor, dtype):
    factor = factor.reshape(factor.shape + (1,) * (x.ndim - factor.ndim))
    return (x.astype(dtype) * factor).astype(x.dtype)
