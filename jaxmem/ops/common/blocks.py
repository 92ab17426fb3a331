"""Loops over blocks of an axis, for ops that must not hold a whole intermediate.

`blockwise` runs a function once a block inside `lax.scan`, hands it slices of the
arrays that have the axis, and writes each output to its place, or adds it to a sum.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem import _compat


class BlockedOutput(NamedTuple):
    """A whole output; blocks go along `axis`, or are summed where it is None."""

    shape: tuple[int, ...]
    dtype: Any
    axis: int | None


@dataclass(frozen=True)
class BlockedAxis:
    """`count` blocks of `size` along an axis of `length`."""

    length: int
    size: int
    # Each block takes rows from every shard: a loop over a sharded axis gathers it.
    strided: bool = False  # divides its axis exactly

    @property
    def count(self) -> int:
        return -(-self.length // self.size)

    @property
    def ragged(self) -> bool:
        return self.length % self.size != 0

    def start(self, n):
        # The last block starts early enough to be whole.
        return jnp.minimum(n * self.size, self.length - self.size)

    def index(self, n):
        """Positions of block `n`, int32; `fresh`: those no earlier block had."""
        lane = jnp.arange(self.size, dtype=jnp.int32)
        return lane * self.count + n if self.strided else lane + self.start(n)

    def fresh(self, n):
        return self.index(n) >= n * self.size

    def take(self, x, axis: int, n):
        if not self.strided:
            return jax.lax.dynamic_slice_in_dim(x, self.start(n), self.size, axis)
        x = self._apart(x, axis)
        return jax.lax.dynamic_index_in_dim(x, n, axis + 1, keepdims=False)

    def put(self, x, block, axis: int, n):
        if not self.strided:
            return jax.lax.dynamic_update_slice_in_dim(x, block, self.start(n), axis)
        apart = self._apart(x, axis)
        return jax.lax.dynamic_update_index_in_dim(apart, block, n, axis + 1).reshape(
            x.shape
        )

    def _apart(self, x, axis: int):
        shape = (*x.shape[:axis], self.size, self.count, *x.shape[axis + 1 :])
        return x.reshape(shape)


def devices_of(x) -> int:
    """Over how many devices the compiler may divide `x`."""
    mesh = jax.typeof(x).sharding.mesh
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    manual = jax.sharding.AxisType.Manual
    return math.prod(size for size, kind in kinds if kind != manual)


def vary_alike(*xs) -> tuple[Any, ...]:
    """The arrays (or None), varying alike, as a custom_vjp needs under shard_map."""
    axes = _compat.varying_axes(*(x for x in xs if x is not None))
    return tuple(None if x is None else _compat.vary(x, axes) for x in xs)


def tied(n, x):
    """`n`, known no earlier than the array `x`, when a function is traced."""
    # What depends on a counter alone (a causal mask) would be moved out of an outer
    # scan that is differentiated, and stacked over all blocks. What comes out of a
    # barrier is as unknown as all that goes in. The compiled program does not wait: `x`
    # is not read.
    return jax.lax.optimization_barrier((n, x))[0]


def blockwise(
    cut: BlockedAxis,
    fn: Callable[..., dict[str, Any]],
    ins: Mapping[str, tuple[Any, int]],
    outs: Mapping[str, BlockedOutput],
    likes,  # every array `fn` uses
    add: bool = False,  # a block to what an overlapping earlier one wrote
) -> dict[str, Any]:
    """`fn(n, **blocks)` for each block: a dict with the keys of `outs`."""
    if cut.count == 1:
        blocks = {k: x for k, (x, _) in ins.items()}
        got = fn(tied(jnp.int32(0), next(iter(blocks.values()))), **blocks)
        return {k: got[k].astype(o.dtype) for k, o in outs.items()}

    def body(carry, n):
        blocks = {
            k: cut.take(carry[k] if k in over else x, axis, n)
            for k, (x, axis) in ins.items()
        }
        got = fn(tied(n, next(iter(blocks.values()))), **blocks)
        new = {k: _written(cut, carry[k], got[k], o, n, add) for k, o in outs.items()}
        return new, None

    # The loop then holds one array for an input and the output of its name.
    over = {k for k, o in outs.items() if k in ins and _takes_place(cut, o, *ins[k])}
    axes = _compat.varying_axes(*likes)
    start = lambda k, o: ins[k][0] if k in over else jnp.zeros(o.shape, o.dtype)
    init = {k: _compat.vary(start(k, o), axes) for k, o in outs.items()}
    return jax.lax.scan(body, init, jnp.arange(cut.count, dtype=jnp.int32))[0]


def _written(cut: BlockedAxis, whole, block, out: BlockedOutput, n, add: bool):
    """The whole output with block `n` in it."""
    block = block.astype(out.dtype)
    if out.axis is None:
        return whole + block
    if add and cut.ragged:
        block = block + cut.take(whole, out.axis, n)
    return cut.put(whole, block, out.axis, n)


def _takes_place(cut: BlockedAxis, out: BlockedOutput, x, axis: int) -> bool:
    """Whether an output may be written over an input: no block is read twice."""
    same = out.shape == x.shape and out.dtype == x.dtype
    return same and out.axis == axis and not cut.ragged
