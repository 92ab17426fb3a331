"""Adam's update on TPUs: parameter and moments are overwritten in one pass.

A leaf is viewed with its axes in the order in which the compiler lays them out, so that
it needs no copy in another layout. Blocks may extend past the edges: nothing is summed
over them, and what lies outside is not written. Parameter and moments alias their
outputs: no other array of their size exists.

Memory traffic in elements: p, m, v and g read, p, m and v written (7 a parameter);
without p 5, without g 4.

Limits: a leaf of few elements costs a launch of its own. A leaf that a step lays out in
another way than its arguments is copied.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _compat
from pallas_kernels.adam import reference
from pallas_kernels.arrays import LANES, like
from pallas_kernels.hashing import random_bits

# Padded elements of a block: seven float32 arrays of them, two blocks each, are 7 MiB.
_BLOCK = 2**17
_SUBLANES = 16  # rows in a tile of bfloat16
_WIDE = 2048


class _View(NamedTuple):
    """A leaf as `x.transpose(order).reshape(shape)`, of two axes or more.

    An element's row and column in the leaf (`reference.leaf_positions`) are sums over
    the view's axes of an index times the number here.
    """

    order: tuple[int, ...]
    shape: tuple[int, ...]
    row: tuple[int, ...]
    column: tuple[int, ...]


def update(old, factors, seed=None, *, block_size=None):
    """The new leaves; arguments are those of `adam.gpu.update`.

    `block_size` is along each axis of the view (from major to minor, one axis folded or
    with another of 1); the last two multiples of 16 and 128, or all of theirs.
    """
    reference.check_leaf(old, ("float32", "bfloat16"))
    shape = old["m"].shape
    view = _view(shape)
    block = block_size or _block(view.shape)
    arrays = {k: x.transpose(view.order).reshape(view.shape) for k, x in old.items()}
    names, order = reference.written(old), list(arrays)
    random = reference.uses_bits(old, seed)
    tile = pl.BlockSpec(block, lambda *at: at[: len(block)])
    aliases = {2 + order.index(k): i for i, k in enumerate(names)}
    ragged = any(size % part for size, part in zip(view.shape, block, strict=True))
    outs = pl.pallas_call(
        functools.partial(
            _kernel, order=order, names=names, view=view if random else None
        ),
        out_shape=[like(arrays[k], arrays[k].shape, arrays[k].dtype) for k in names],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=tuple(map(pl.cdiv, view.shape, block)),
            in_specs=[tile for _ in order],
            out_specs=[tile for _ in names],
        ),
        input_output_aliases=_compat.aliases(aliases, ragged=ragged),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * len(block)
        ),
        name="jaxmem_adam",
    )(
        factors.astype(jnp.float32),
        seed if random else jnp.zeros(2, jnp.uint32),
        *arrays.values(),
    )
    return {k: _unseen(x, view, shape) for k, x in zip(names, outs, strict=True)}


def _kernel(factors, seed, *refs, order, names, view):
    tiles = {k: ref[...] for k, ref in zip(order, refs[: len(order)], strict=True)}
    scalars = reference.read_factors(factors)
    bits = None if view is None else _bits(seed, tiles["p"].shape, view)
    new = reference.update_tile(tiles, scalars, bits)
    for name, ref in zip(names, refs[len(order) :], strict=True):
        ref[...] = new[name]


def _bits(seed, block, view: _View):
    """The random bits of a block."""
    row = column = jnp.zeros((1,) * len(block), jnp.uint32)
    for axis, size in enumerate(block):
        along = [1] * len(block)
        along[axis] = size
        index = lax.broadcasted_iota(jnp.int32, along, axis)
        index = (index + pl.program_id(axis) * size).astype(jnp.uint32)
        if view.row[axis]:
            row = row + index * np.uint32(view.row[axis] % 2**32)
        if view.column[axis]:
            column = column + index * np.uint32(view.column[axis])
    return jnp.broadcast_to(random_bits(seed, row, column), block)


def _unseen(x, view: _View, shape: tuple[int, ...]):
    moved = [shape[axis] for axis in view.order]
    return x.reshape(moved).transpose(np.argsort(view.order).tolist())


def _view(shape: tuple[int, ...]) -> _View:
    """The view of a leaf that needs no other layout."""
    if len(shape) < 2:
        return _line(len(shape), math.prod(shape))
    order = _order(shape)
    last = len(shape) - 1
    row = [math.prod(shape[axis + 1 : last]) * (axis < last) for axis in order]
    column = [int(axis == last) for axis in order]
    return _View(order, tuple(shape[axis] for axis in order), tuple(row), tuple(column))


def _line(ndim: int, size: int) -> _View:
    """The view of one axis, folded where it lies so in memory anyway."""
    rows = size // LANES if size % (8 * LANES) == 0 else 1
    columns = size // rows
    return _View(tuple(range(ndim)), (rows, columns), (0, 0), (columns, 1))


def _order(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes from major to minor: the compiler chooses the least padding."""
    usual = tuple(range(len(shape)))

    def padded(order):
        *lead, second, minor = (shape[axis] for axis in order)
        high = min(8, pl.next_power_of_2(second))
        return math.prod(lead) * _up(second, high) * _up(minor, LANES)

    pairs = itertools.permutations(reversed(usual), 2)
    orders = [
        (*(axis for axis in usual if axis not in pair), *reversed(pair))
        for pair in pairs
    ]
    return min(orders, key=padded)  # the first of equals; `usual` is the first


def _block(view: tuple[int, ...]) -> tuple[int, ...]:
    """About `_BLOCK` elements with their padding: columns first, then rows."""
    *lead, rows, columns = view
    full_rows = _up(rows, _SUBLANES)
    wide = min(_up(columns, LANES), max(_WIDE, _BLOCK // full_rows // LANES * LANES))
    high = min(full_rows, _BLOCK // wide // _SUBLANES * _SUBLANES)
    block, left = [min(columns, wide), min(rows, high)], _BLOCK // (wide * high)
    for size in reversed(lead):
        block.append(min(size, max(1, left)))
        left //= block[-1]
    return tuple(reversed(block))


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
