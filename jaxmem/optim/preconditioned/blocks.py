"""Blocks of a matrix: groups of equal ones, the smaller ones at its ends apart."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Run(NamedTuple):
    """Equal parts of a side: where they begin, how many, and the length of each."""

    start: int
    blocks: int
    length: int


class BlockGroup(NamedTuple):
    """Equal blocks of a matrix.

    Attributes:
      rows: how the rows are cut.
      columns: how the columns are cut.
    """

    rows: Run
    columns: Run

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return self.rows.blocks * self.columns.blocks

    def taken(self, x: Float[Array, "m n"]) -> Float[Array, "blocks rows columns"]:
        """The blocks of a matrix, row by row."""
        (i, p, m), (j, q, n) = self
        parts = x[i : i + p * m, j : j + q * n].reshape(p, m, q, n)
        return parts.transpose(0, 2, 1, 3).reshape(p * q, m, n)

    def placed(self, blocks: Float[Array, "blocks rows columns"]) -> jax.Array:
        """The part of the matrix that blocks are."""
        (_, p, m), (_, q, n) = self
        parts = blocks.reshape(p, q, m, n).transpose(0, 2, 1, 3)
        return parts.reshape(p * m, q * n)


def block_groups(m: int, n: int, size: int) -> list[list[BlockGroup]]:
    """The groups of an [m, n] matrix cut into blocks of `size`, as they lie in it."""
    rows, columns = _runs(m, size), _runs(n, size)
    return [[BlockGroup(row, column) for column in columns] for row in rows]


def joined(parts: list[list[jax.Array]]) -> jax.Array:
    """The matrix of the parts that its groups are."""
    if len(parts) == 1 and len(parts[0]) == 1:
        return parts[0][0]
    return jnp.block(parts)


def _runs(length: int, size: int) -> list[Run]:
    count, rest = divmod(length, size)
    whole = [Run(0, count, size)] if count else []
    return [*whole, Run(count * size, 1, rest)] if rest else whole
