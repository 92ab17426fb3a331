"""Blocks of a leaf that share one number: the second moments of Adam-mini.

Blocks are given by how many there are along each axis of a layer; -1 is one an index.
`(1, -1)` of a kernel [in, out] is a block an output, `(-1, 1)` of an embedding
[vocabulary, width] one a row, `(1, 16)` of a query kernel [in, heads * d] one a head.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxmem._checks import check_numbers, wrong_type, wrong_value
from jaxmem._paths import check_matched, matches, paths_and_leaves, selection

Counts = tuple[int, ...]
_ALLOWED = "a dict from path patterns to numbers of blocks along each axis of a layer"


def check_blocks(blocks: Any) -> dict[Any, Counts]:
    """Checked, and each number of blocks as a tuple; None is none."""
    if blocks is None:
        return {}
    if not isinstance(blocks, Mapping):
        raise wrong_type("blocks", blocks, _ALLOWED)
    for pattern in blocks:
        if not isinstance(pattern, str | re.Pattern):
            raise wrong_type("blocks", blocks, _ALLOWED)
    checked = {k: check_numbers(f"blocks[{k!r}]", v) for k, v in blocks.items()}
    for pattern, counts in checked.items():
        if any(n != -1 and n < 1 for n in counts):
            allowed = "numbers of blocks, at least 1, or -1 for one an index"
            raise wrong_value(f"blocks[{pattern!r}]", counts, allowed)
    return checked


def all_counts(
    who: str, blocks: Mapping, full: Any, tree: PyTree, layers: Sequence[int]
) -> list[Counts]:
    """For each leaf how many blocks there are along each axis of a layer."""
    named = paths_and_leaves(tree)
    given: list[Counts | None] = [None] * len(named)
    for pattern, counts in reversed(
        list(blocks.items())
    ):  # the first that matches holds
        hits = [matches(pattern, path) for path, _ in named]
        check_matched(pattern, hits, named, f"{who}: blocks")
        given = [counts if h else g for h, g in zip(hits, given, strict=True)]
    whole = [False] * len(named)
    if full is not None:
        whole = selection(f"{who}: full", full, tree)
    every = zip(named, given, whole, layers, strict=True)
    return [_counts(who, p, x.shape[k:], g, w) for (p, x), g, w, k in every]


def _counts(who, path, shape, given: Counts | None, whole: bool) -> Counts:
    if whole:
        return tuple(shape)
    if given is None:  # a block an output of a matrix, one block of a vector
        ones = (1,) * len(shape)
        return (*ones[1:], shape[-1]) if len(shape) > 1 else ones
    pairs = list(zip(shape, given, strict=False))
    numbers = tuple(n if b == -1 else b for n, b in pairs)
    if len(given) != len(shape) or any(b != -1 and n % b for n, b in pairs):
        raise ValueError(
            f"{who}: blocks={given} of {path!r}: a layer of it has shape "
            f"{tuple(shape)}; one number an axis that divides it, or -1"
        )
    return numbers


def means(x, counts: Counts):
    """The mean of each block, [layers..., *counts]."""
    first = x.ndim - len(counts)
    whole = tuple(first + i for i, n in enumerate(counts) if n == 1)
    # Axes that go altogether first: what is left to split is small.
    x = jnp.mean(x, axis=whole, keepdims=True) if whole else x
    for i, n in enumerate(counts):
        axis = first + i
        if n not in (1, x.shape[axis]):
            x = jnp.mean(_split(x, axis, n), axis=axis + 1)
    return x


def spread(v, shape: Sequence[int], counts: Counts):
    """For each element the number of its block, in a shape that broadcasts."""
    first = len(shape) - len(counts)
    for i, n in enumerate(counts):
        axis = first + i
        if n not in (1, shape[axis]):
            sizes = (*v.shape[:axis], n, shape[axis] // n, *v.shape[axis + 1 :])
            places = [d for d in range(len(sizes)) if d != axis + 1]
            wide = jax.lax.broadcast_in_dim(v, sizes, places)
            merged = (*v.shape[:axis], shape[axis], *v.shape[axis + 1 :])
            v = wide.reshape(merged)
    return v


def _split(x, axis: int, n: int):
    size = x.shape[axis] // n
    return x.reshape(*x.shape[:axis], n, size, *x.shape[axis + 1 :])
