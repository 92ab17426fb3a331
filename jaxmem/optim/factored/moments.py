"""A second moment as the outer product of its row and column means.

The two axes of the matrix are the largest of those that do not count layers: the last
two where all leading axes are layers. Every other axis is a batch axis.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmem.optim.accumulation.dtypes import accumulation_dtype
from jaxmem.optim.factored.leaves import check_shape

Axes = tuple[int, int]


class FactoredMoment(NamedTuple):
    """Means of a matrix V, which is estimated as `row col^T / mean(row)`."""

    row: Float[Array, "*batch m"]  # over the columns
    col: Float[Array, "*batch n"]  # over the rows


Moment = FactoredMoment | Float[Array, "..."]


def matrix_axes(shape: Sequence[int], layers: int, least: int = 0) -> Axes | None:
    """The axes (rows, columns) of the matrix; None where the moment is kept whole.

    `layers`: how many leading axes count layers. `least`: what both sizes must reach.
    """
    rest = shape[layers:]
    if len(rest) < 2:
        return None
    *_, rows, columns = np.argsort(rest, kind="stable")
    if rest[rows] < least:
        return None
    return layers + min(rows, columns), layers + max(rows, columns)


def zeros(p, axes: Axes | None) -> Moment:
    """A moment of zeros for a parameter."""
    dtype = accumulation_dtype(p)
    if axes is None:
        return jnp.zeros_like(p, dtype=dtype)
    return FactoredMoment(*(_zeros_without(p, axis, dtype) for axis in reversed(axes)))


def _zeros_without(p, axis: int, dtype):
    # A sum's type has the sharding of the axes that stay, where types have shardings.
    kind = jax.eval_shape(lambda x: jnp.sum(x, axis=axis), p)
    return jnp.zeros_like(kind, dtype=dtype)


def averaged(moment: Moment, x, keep, add, axes: Axes | None) -> Moment:
    """`keep` times the moment plus `add` times `x`, or its means."""
    if not isinstance(moment, FactoredMoment):
        return keep * moment + add * x
    assert axes is not None  # only a matrix has factors
    means = (jnp.mean(x, axis=axis) for axis in reversed(axes))
    return FactoredMoment(
        *(keep * f + add * m for f, m in zip(moment, means, strict=True))
    )


def divided_by_root(x, moment: Moment, axes: Axes | None):
    """`x` over the root of the estimated moment."""
    if not isinstance(moment, FactoredMoment):
        return x * jax.lax.rsqrt(moment)
    assert axes is not None  # only a matrix has factors
    rows, columns = axes
    row = jnp.expand_dims(moment.row, columns)
    col = jnp.expand_dims(moment.col, rows)
    mean = jnp.mean(row, axis=rows, keepdims=True)
    # Roots first: a product of small means would leave float32's range.
    return x * jax.lax.rsqrt(row / mean) * jax.lax.rsqrt(col)


def check_moment(who: str, path: str, moment: Moment, x, axes: Axes | None) -> None:
    """ValueError for the moment of a parameter of another shape."""
    if axes is None or not isinstance(moment, FactoredMoment):
        found = moment.row if isinstance(moment, FactoredMoment) else moment
        wanted = x.shape if axes is None else _shape_without(x.shape, axes[1])
        check_shape(who, path, found.shape, wanted)
        return
    for factor, axis in zip(moment, reversed(axes), strict=True):
        check_shape(who, path, factor.shape, _shape_without(x.shape, axis))


def _shape_without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])
