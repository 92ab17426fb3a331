"""A leaf updated in a loop over chunks of its rows.

TPU lays an array out anew to group its last axis, 5 to 24 bytes an element, which a
loop bounds by the size of a chunk. Only leaves of two axes go this way: more are a
stack of layers, which `jaxmem.schedule` updates a layer at a time, or small.

Rows are split into `outer` contiguous parts, and a chunk has some rows of each: a
device that holds whole parts then has its rows of every chunk; nothing is gathered.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from jaxmem.ir.host_slices import hiding

LEAST_ELEMENTS = 2**21  # of a leaf
_CHUNK = 2**19  # elements; fewer would not fill a GPU
_MOST_CHUNKS = 64
_ALIGNED = 32  # rows of a tile of bytes on TPU

MARK = "jaxmem.rows"  # the name scope in which `on_platforms` chooses


class Chunks(NamedTuple):
    """`rows` consecutive ones of each of `outer` equal parts of the first axis."""

    outer: int
    rows: int


def chunks_of(shape: tuple[int, ...]) -> Chunks | None:
    """How to cut a leaf, or None for one that is updated as a whole."""
    if len(shape) != 2 or shape[0] * shape[1] < LEAST_ELEMENTS:
        return None
    rows = max(_CHUNK, shape[0] * shape[1] // _MOST_CHUNKS) // shape[1]
    if shape[0] < 2 * _ALIGNED:
        return None
    outer = 1
    while 2 * outer * _ALIGNED <= rows and shape[0] % (2 * outer * _ALIGNED) == 0:
        outer *= 2
    return Chunks(outer, max(rows // outer // _ALIGNED, 1) * _ALIGNED)


def on_platforms(
    fn: Callable[..., PyTree],
    chunks: Chunks,
    platforms: Iterable[str],
    carried: PyTree,
    read: PyTree,
) -> Any:
    """`fn(None, carried, read)`; on these platforms `by_rows`, chunk by chunk.

    The function works on each row alone, and `jaxmem.schedule` relies on that: it moves
    what is done to the results, row by row, into the loop.
    """
    looped, whole = functools.partial(by_rows, fn, chunks), functools.partial(fn, None)
    with jax.named_scope(MARK):
        return lax.platform_dependent(
            carried, read, default=whole, **dict.fromkeys(platforms, looped)
        )


def by_rows(
    fn: Callable[..., PyTree], chunks: Chunks, carried: PyTree, read: PyTree
) -> Any:
    """`fn` on every chunk, its results instead of what is carried.

    Args:
      fn: `(lead, carried, read) -> carried`, with arrays of the axes [outer, rows,
        ...], without the first if it is one, and `lead`, uint32, the index of each row.
      chunks: of `chunks_of`.
      carried: arrays with the same number of rows, updated in place.
      read: arrays with as many.
    """
    total = jax.tree.leaves(carried)[0].shape[0]
    part, whole = total // chunks.outer, chunks.outer == 1
    # TPU copies an array whose rows fill no tile for a first axis of one
    split = lambda x: x if whole else x.reshape(chunks.outer, part, *x.shape[1:])
    carried, read = jax.tree.map(split, (carried, read))
    run = functools.partial(_chunk, fn, read, 0 if whole else 1)
    count, rest = divmod(part, chunks.rows)
    if rest and _is_on_host(carried):
        # only as a whole: what is written there cannot be mixed with what is there
        carried, rest = run(part - rest, None, rest, carried), 0

    hide = hiding() if _is_on_host((carried, read)) else lambda i: i

    def body(i: Any, carried: PyTree) -> PyTree:
        # The last chunk has all rows, too, those of the one before among them: for
        # fewer, TPU may lay the whole array out anew.
        first = hide(i) * chunks.rows
        if not rest:
            return run(first, None, chunks.rows, carried)
        start = jnp.minimum(first, part - chunks.rows)
        return run(start, first, chunks.rows, carried)

    carried = lax.fori_loop(0, count + bool(rest), body, carried)
    join = lambda x: x if whole else x.reshape(total, *x.shape[2:])
    return jax.tree.map(join, carried)


def _is_on_host(arrays: PyTree) -> bool:
    spaces = (jax.typeof(x).memory_space for x in jax.tree.leaves(arrays))
    return jax.memory.Space.Host in spaces


def _chunk(
    fn: Callable[..., PyTree],
    read: PyTree,
    axis: int,
    start: Any,
    first: Any,
    rows: int,
    carried: PyTree,
) -> PyTree:
    """What is carried after `rows` rows of each part, from `start` on.

    Those before `first` stay as they are; None: all are new.
    """
    cut = lambda x: lax.dynamic_slice_in_dim(x, start, rows, axis)
    put = lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start, axis)
    old = jax.tree.map(cut, carried)
    shape = jax.tree.leaves(carried)[0].shape[: axis + 1]
    at = lax.broadcasted_iota(jnp.uint32, (*shape[:axis], rows), axis)
    at = lead = at + jnp.asarray(start, jnp.uint32)
    if axis:
        lead = lead + shape[1] * lax.broadcasted_iota(jnp.uint32, lead.shape, 0)
    new = fn(lead, old, jax.tree.map(cut, read))
    if first is not None:
        is_new = at >= jnp.asarray(first, jnp.uint32)
        wide = lambda x: is_new.reshape(*is_new.shape, *[1] * (x.ndim - is_new.ndim))
        new = jax.tree.map(lambda x, y: jnp.where(wide(x), y, x), old, new)
    return jax.tree.map(put, carried, new)
