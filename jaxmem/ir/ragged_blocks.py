"""Products of groups of rows, `jax.lax.ragged_dot`, in blocks of rows of one group.

For compilers without such a product (`ragged.py`): as many multiplications as the rows
take, where those multiply every row by every group's matrix. Each group's rows are cut
into blocks of equally many, the last of which is filled up; how many blocks there are
at most follows from the shapes alone. Some blocks at a time are one batched product, in
a loop over all of them. MegaBlocks (Gale et al. 2023, arXiv 2211.15841) has the blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.ir.ragged import is_ragged
from jaxmem.ir.types import JaxprEqn


@dataclass(frozen=True)
class RowBlocks:
    """How the rows of a product are cut.

    Attributes:
      rows: of a block.
      together: blocks of an iteration.
    """

    rows: int
    together: int

    def count(self, rows: int, groups: int) -> int:
        """Blocks that there are at most, in whole iterations."""
        # each group has a block that is not full, or empty, at most
        most = rows // self.rows + groups
        return -(-most // self.together) * self.together


@dataclass(frozen=True)
class RaggedShape:
    """Sizes of a product of groups of rows.

    Attributes:
      rows: of all groups.
      groups: how many.
      inner: columns of the rows.
      outer: columns of each group's matrix, or of the other rows.
      sums_rows: whether there is a matrix for each group in the result, and not among
        the operands: the sum over its rows, as in the gradient of such matrices.
    """

    rows: int
    groups: int
    inner: int
    outer: int
    sums_rows: bool


def ragged_shape(eqn: JaxprEqn) -> RaggedShape | None:
    """The sizes of a product that can be done in blocks; None for any other."""
    if not is_ragged(eqn) or eqn.params["group_offset"] is not None:
        return None
    if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return None  # sums of rows are kept in float32
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (summed, batched) = numbers.dot_dimension_numbers
    lhs, rhs, sizes = (v.aval.shape for v in eqn.invars)
    first = tuple(numbers.lhs_ragged_dimensions) == (0,)
    if not first or batched != ((), ()) or len(lhs) != 2 or len(sizes) != 1:
        return None
    if tuple(numbers.rhs_group_dimensions) == (0,) and len(rhs) == 3:
        ((left,), (right,)) = summed
        if left == 1:
            return RaggedShape(lhs[0], sizes[0], lhs[1], rhs[3 - right], False)
    if not numbers.rhs_group_dimensions and len(rhs) == 2:
        if tuple(map(tuple, summed)) == ((0,), (0,)):
            return RaggedShape(lhs[0], sizes[0], lhs[1], rhs[1], True)
    return None


def in_blocks(eqn: JaxprEqn, args: list, form: RowBlocks) -> Any:
    """The result of such a product, in blocks."""
    shape = ragged_shape(eqn)
    assert shape is not None
    lhs, rhs, sizes = args
    run = _RaggedRun(eqn, form, shape, _Places.of(sizes, form, shape))
    with jax.named_scope("ragged_dot_in_blocks"):
        return run.sums(lhs, rhs) if shape.sums_rows else run.rows(lhs, rhs)


@dataclass(frozen=True)
class _Places:
    """Of each block its group, and whether it is that group's first; of its rows where
    they are, and whether they are the group's."""

    group: jax.Array  # [blocks]
    first: jax.Array  # [blocks]
    row: jax.Array  # [blocks, rows]
    own: jax.Array  # [blocks, rows]

    @staticmethod
    def of(sizes, form: RowBlocks, shape: RaggedShape) -> "_Places":
        sizes = sizes.astype(jnp.int32)
        ends = jnp.cumsum(sizes)
        # one block of an empty group, too: its sum over no rows is zeros
        blocks = jnp.maximum(-(-sizes // form.rows), 1)
        last = jnp.cumsum(blocks)
        block = jnp.arange(form.count(shape.rows, shape.groups), dtype=jnp.int32)
        group = jnp.searchsorted(last, block, side="right").astype(jnp.int32)
        there, group = group < shape.groups, jnp.minimum(group, shape.groups - 1)
        number = block - (last - blocks)[group]
        at = number[:, None] * form.rows + jnp.arange(form.rows, dtype=jnp.int32)
        own = (at < sizes[group][:, None]) & there[:, None]
        row = (ends - sizes)[group][:, None] + at
        return _Places(group, there & (number == 0), row, own)

    def some(self, start, count: int) -> "_Places":
        """Those of some blocks in a row."""
        cut = lambda x: lax.dynamic_slice_in_dim(x, start, count)
        group, first = cut(self.group), cut(self.first)
        return _Places(group, first, cut(self.row), cut(self.own))


@dataclass(frozen=True)
class _RaggedRun:
    eqn: JaxprEqn
    form: RowBlocks
    shape: RaggedShape
    places: _Places

    def rows(self, lhs, rhs):
        """[rows, outer]: each row by its group's matrix."""
        out = self.eqn.outvars[0]
        numbers = self.eqn.params["ragged_dot_dimension_numbers"]
        ((_,), (right,)) = numbers.dot_dimension_numbers[0]
        dims = (((2,), (right,)), ((0,), (0,)))
        # where a row goes that is none of its block's: after all others, each elsewhere
        spare = self.shape.rows + jnp.arange(self.form.together * self.form.rows)

        def iteration(at: _Places, total):
            own, row = at.own.reshape(-1), at.row.reshape(-1)
            x, w = _taken(lhs, at.row), _taken(rhs, at.group)
            made = self._product(x, w, dims, out.aval.dtype)
            made = made.reshape(-1, self.shape.outer)
            where = jnp.where(own, row, spare.astype(row.dtype))
            how = {"mode": "drop", "unique_indices": True}
            return total.at[where].set(made, **how)

        return self._loop(iteration, _zeros(out.aval, out))

    def sums(self, lhs, rhs):
        """[groups, inner, outer]: the products of a group's rows, summed."""
        out = self.eqn.outvars[0]
        wide = jnp.promote_types(out.aval.dtype, jnp.float32)
        dims = (((1,), (1,)), ((0,), (0,)))

        def iteration(at: _Places, carry):
            total, sums = carry
            # both: what is not a number in another group's row stays there
            x, y = self._kept(lhs, at), self._kept(rhs, at)
            parts = self._product(x, y, dims, wide)
            for i in range(self.form.together):
                # a group's sum is kept wide until its last block has been added, and
                # written each time: the last is what stays
                sums = jnp.where(at.first[i], 0, sums) + parts[i]
                # what comes after all blocks adds nothing to the last group
                made = sums.astype(total.dtype)[None]
                total = lax.dynamic_update_slice_in_dim(total, made, at.group[i], 0)
            return total, sums

        sums = jax.ShapeDtypeStruct((self.shape.inner, self.shape.outer), wide)
        return self._loop(iteration, (_zeros(out.aval, out), _zeros(sums, out)))[0]

    def _loop(self, iteration: Callable, carry):
        blocks = len(self.places.group)
        if blocks == self.form.together:
            return iteration(self.places, carry)

        def body(state):
            start, carry = state
            at = self.places.some(start, self.form.together)
            return start + self.form.together, iteration(at, carry)

        # not a scan: no pass has anything to do in here
        going = lambda state: state[0] < blocks
        return lax.while_loop(going, body, (jnp.int32(0), carry))[1]

    def _kept(self, x, at: _Places):
        return jnp.where(at.own[..., None], _taken(x, at.row), 0)

    def _product(self, x, y, dims, dtype):
        precision = self.eqn.params["precision"]
        how = {"precision": precision, "preferred_element_type": dtype}
        return lax.dot_general(x, y, dims, **how)


def _taken(x, at):
    return jnp.take(x, at, axis=0, mode="clip")


def _zeros(aval, like):
    return _compat.typed_as(jnp.zeros(aval.shape, aval.dtype), like.aval)
