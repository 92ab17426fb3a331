"""Shampoo of one matrix, block by block, with the length of another rule's step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, PyTree

from jaxmem.optim.low_bit.low_bit import LowBit
from jaxmem.optim.low_bit.random import mix
from jaxmem.optim.orthogonal.sharded import over_batch
from jaxmem.optim.preconditioned.blocks import BlockGroup, block_groups, joined
from jaxmem.optim.preconditioned.grafting import GraftingRule
from jaxmem.optim.preconditioned.leaves import drawn
from jaxmem.optim.preconditioned.roots import inverse_root
from jaxmem.optim.preconditioned.symmetric import (
    PreconditionerDType,
    Zeros,
    empty_symmetric,
    load_symmetric,
    store_symmetric,
    with_gradient,
)


class ShampooState(NamedTuple):
    """State of `scale_by_shampoo`.

    Attributes:
      count: int32[], steps.
      mu: first moment, of the parameters' shapes: `MomentCodes` a leaf, or float32.
      nu: second moment of the grafted rule, likewise, or None.
      blocks: of each leaf of matrices a tuple with a `BlocksState` for each group of
        equal blocks, or None.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: PyTree
    nu: PyTree
    blocks: PyTree


class BlocksState(NamedTuple):
    """What is kept of equal blocks [m, n] of a leaf's matrices.

    Attributes:
      left: [*batch, blocks, m, m]; None if blocks have the other side alone.
      right: [*batch, blocks, n, n]; likewise.
    """

    left: "RootState | None"
    right: "RootState | None"


class RootState(NamedTuple):
    """One side of blocks.

    Attributes:
      gram: the mean, or the sum, of g g^T (of g^T g on the right), as stored.
      root: its inverse fourth root, or square root of a side that is alone, as stored.
    """

    gram: Any
    root: Any


class ShampooRule(NamedTuple):
    """What is done to each matrix; see `shampoo` for the arguments."""

    how: LowBit
    b1: Any
    b2: Any
    eps: Any
    block_size: int
    one_sided: bool
    frequency: int
    start: int
    grafting: GraftingRule
    dtype: PreconditionerDType

    def has_moments(self, matrix: bool) -> tuple[bool, bool]:
        """The grafted rule may have no second moment."""
        del matrix
        return True, self.grafting.has_moment

    def kept(self, m: int, n: int, side: Callable[[str], Zeros]) -> tuple[Any, ...]:
        """The groups of blocks of a new matrix."""
        every = sum(block_groups(m, n, self.block_size), [])
        return (tuple(self._empty(group, side) for group in every),)

    def matrix(self, count, seed, g, m, v, groups) -> tuple[Any, ...]:
        """(update, mu, nu, groups); without groups it is the grafted rule."""
        t = (count + 1).astype(jnp.float32)
        m = self.b1 * m + (1 - self.b1) * g
        ahead = m / (1 - self.b1**t)
        step, v = self.grafting.step(t, g, ahead, v)
        if groups is None:
            return step, m, v, None
        rows, columns = g.shape
        kept, states, parts = iter(groups), [], []
        for row in block_groups(rows, columns, self.block_size):
            parts.append([])
            for group in row:
                own = drawn(seed, 2 + len(states))
                arrays = [group.taken(x) for x in (g, ahead, step)]
                u, state = self._of_group(count, own, next(kept), arrays)
                parts[-1].append(group.placed(u))
                states.append(state)
        return joined(parts), m, v, tuple(states)

    def _of_group(self, count, seed, state: BlocksState, arrays: list):
        """Updates of the blocks of a group, one after another, and their state."""
        n = len(arrays[0])
        seeds = None if seed is None else mix(seed + lax.iota(jnp.uint32, n))
        one = lambda seed, left, right, *own: self._of_block(
            count, seed, left, right, *own
        )
        if n > 1:
            u, *sides = over_batch(one, 1)(seeds, *state, *arrays)
        else:
            # no loop, which would keep `schedule` from seeing the products
            first = lambda x: lax.squeeze(x, (0,))
            add = lambda x: lax.expand_dims(x, (0,))
            inside = jax.tree.map(first, (seeds, *state, *arrays))
            u, *sides = jax.tree.map(add, one(*inside))
        return u, BlocksState(*sides)

    def _of_block(self, count, seed, left, right, g, ahead, step):
        u, sides = ahead, [left, right]
        if left is not None:
            sides[0] = self._side(count, seed, 0, left, g)
            u = load_symmetric(sides[0].root) @ u
        if right is not None:
            sides[1] = self._side(count, seed, 1, right, g.T)
            u = u @ load_symmetric(sides[1].root)
        u = self.grafting.grafted(u, step)
        return jnp.where(count + 1 < self.start, step, u), *sides

    def _side(self, count, seed, which: int, state: RootState, g) -> RootState:
        """A side with this gradient in it, and its root where that is due."""
        add = 1.0 if self._sums else 1 - self.b2
        how = self.b2, add, self.dtype, drawn(seed, which)
        gram, t = with_gradient(state.gram, g, *how), count + 1

        def renewed(gram, root):
            correct = 1.0 if self._sums else 1 - self.b2 ** t.astype(jnp.float32)
            mean, rounded = load_symmetric(gram) / correct, self.dtype != "float32"
            order = 2 if self.one_sided else 4
            new = inverse_root(mean, order, self.eps, rounded)
            return store_symmetric(new, self.dtype)

        regular = (t % self.frequency == 0) & (t >= self.start)
        due = regular | (t == self.start)
        root = lax.cond(due, renewed, lambda gram, root: root, gram, state.root)
        return RootState(gram, root)

    @property
    def _sums(self) -> bool:
        return isinstance(self.b2, int | float) and self.b2 == 1

    def _empty(self, group: BlockGroup, side: Callable[[str], Zeros]) -> BlocksState:
        def root_state(which: str, size: int) -> RootState:
            shape, zeros = (group.blocks, size, size), side(which)
            made = (empty_symmetric(shape, self.dtype, zeros) for _ in range(2))
            return RootState(*made)

        m, n = (side.length for side in group)
        small = "left" if m <= n else "right"
        both = (("left", m), ("right", n))
        return BlocksState(
            *(
                None if self.one_sided and which != small else root_state(which, size)
                for which, size in both
            )
        )
