"""Which sides of a matrix are projected, and the shapes that follow.

A projector's rows are orthonormal vectors. On the left it is A [r, m], and the gradient
G [m, n] becomes A G; on the right it is B [r, n], and G becomes G B^T.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

Projection = Literal["std", "reverse_std", "left", "right", "full"]
Side = Literal["left", "right"]


def sides_of(projection: Projection, m: int, n: int) -> tuple[Side, ...]:
    """The sides on which an m x n matrix is projected.

    "std" projects the shorter axis, so that the projector is small and the moments have
    the longer one; "reverse_std" the longer axis.
    """
    if projection == "full":
        return ("left", "right")
    if projection in ("left", "right"):
        return (projection,)
    return ("right",) if (projection == "std") == (m >= n) else ("left",)


def length(side: Side, shape: tuple[int, ...]) -> int:
    """The size of the axis that is projected."""
    return shape[-2] if side == "left" else shape[-1]


def low_rank_shape(
    sides: tuple[Side, ...], shape: tuple[int, ...], rank: int
) -> tuple[int, ...]:
    """The shape of the projected gradient."""
    *batch, m, n = shape
    rows = rank if "left" in sides else m
    return (*batch, rows, rank if "right" in sides else n)


def low_rank_axis(sides: tuple[Side, ...]) -> int:
    """Along which axis of the projected gradient the rank runs, for one side."""
    return -2 if sides == ("left",) else -1


class Vectors(NamedTuple):
    """The projectors of a leaf; None for a side that is not projected."""

    left: Float32[Array, "*batch rank m"] | None
    right: Float32[Array, "*batch rank n"] | None


def project(g: Array, by: Vectors) -> Float32[Array, "*batch rows columns"]:
    """A G, G B^T, or A G B^T."""
    g = g.astype(jnp.float32)
    if by.left is not None:
        g = dot(by.left, g, -1, -2)
    return g if by.right is None else dot(g, by.right, -1, -1)


def project_back(low: Array, by: Vectors) -> Float32[Array, "*batch m n"]:
    """The transposed projectors on both sides."""
    if by.left is not None:
        low = dot(by.left, low, -2, -2)
    return low if by.right is None else dot(low, by.right, -1, -2)


def dot(a: Array, b: Array, along: int, along_b: int, precision=None) -> Array:
    """The product of two stacks of matrices, over one axis of each."""
    batch = tuple(range(a.ndim - 2))
    contracted = ((a.ndim + along,), (b.ndim + along_b,))
    return lax.dot_general(
        a,
        b,
        (contracted, (batch, batch)),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
