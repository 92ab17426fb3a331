"""Parts of an axis that is sharded over devices: of each device's shard a slice.

An axis of s shards, to be cut in n parts, is the view [s, n, rest]. Part j is slice j
of every shard, sharded as the axis is, so that no device needs what another one has. An
axis of one shard is cut in slices that lie one behind the other.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax


class Parts(NamedTuple):
    """In how many parts an axis is cut, and how many shards it has."""

    n: int
    shards: int = 1

    @property
    def blocks(self) -> int:
        """How many pieces the axis is cut in: n of each shard."""
        return self.n * self.shards

    def size(self, length: int) -> int:
        """The length of a part of an axis of this length."""
        return length // self.n

    def view(self, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
        """An array's shape with axes for shards and parts instead of the one."""
        rest = shape[axis] // (self.n * self.shards)
        return (*shape[:axis], self.shards, self.n, rest, *shape[axis + 1 :])

    def take(self, x, axis: int, j):
        """Part number `j` of an array."""
        size = self.size(x.shape[axis])
        if self.shards == 1:
            return lax.dynamic_slice_in_dim(x, j * size, size, axis)
        part = self.take_each(x, axis, j)
        return part.reshape(*x.shape[:axis], size, *x.shape[axis + 1 :])

    def take_each(self, x, axis: int, j):
        """Part number `j` of an array, with an axis for the shards before its own."""
        view = x.reshape(self.view(x.shape, axis))
        return lax.dynamic_index_in_dim(view, j, axis + 1, keepdims=False)

    def put(self, view, x, axis: int, j):
        """The view of an array with part number `j` in its place."""
        part = x.reshape(*view.shape[: axis + 1], 1, *view.shape[axis + 2 :])
        return lax.dynamic_update_slice_in_dim(view, part, j, axis + 1)

    def start(self, length: int, j):
        """Where part number `j` starts on an axis of this length.

        Of an axis of many shards a number for each element of the part: its place on
        the axis, less its place in the part.
        """
        own = j * (length // (self.n * self.shards))
        if self.shards == 1:
            return own
        inside = self.size(length) // self.shards
        before = jnp.arange(self.shards, dtype=jnp.int32) * (
            length // self.shards - inside
        )
        return jnp.repeat(before + own, inside)
