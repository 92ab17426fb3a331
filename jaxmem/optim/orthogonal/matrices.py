"""Which leaves are matrices, or stacks of them, and along which axes."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr
from jaxtyping import PyTree

from jaxmem._checks import shown, wrong_type
from jaxmem._paths import check_selection, selection

_ALLOWED = (
    "optax.contrib.MuonDimensionNumbers, None, a tree of these with the structure of "
    "the parameters or a prefix of it, or a function of the parameters that gives one"
)


class MatrixAxes(NamedTuple):
    """The axes of a leaf, each list in order.

    Attributes:
      batch: those that count matrices.
      rows: what is summed over where the weight is used.
      columns: the others.
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def leading(self) -> bool:
        """Whether the axes that count matrices come first."""
        return self.batch == tuple(range(len(self.batch)))

    @property
    def of_one(self) -> "MatrixAxes":
        """The axes of one matrix, where those that count matrices come first."""
        less = lambda axes: tuple(d - len(self.batch) for d in axes)
        return MatrixAxes((), less(self.rows), less(self.columns))

    def sizes(self, shape: Sequence[int]) -> tuple[int, int]:
        """(rows, columns) of each matrix of a leaf of this shape."""
        of = lambda axes: math.prod(shape[d] for d in axes)
        return of(self.rows), of(self.columns)

    def matrices(self, x: jax.Array) -> jax.Array:
        """The leaf as [*batch, rows, columns]."""
        turned = x.transpose(self.batch + self.rows + self.columns)
        return turned.reshape(*turned.shape[: len(self.batch)], *self.sizes(x.shape))

    def leaf(self, x: jax.Array, shape: Sequence[int]) -> jax.Array:
        """What `matrices` has made of a leaf of this shape, as it was."""
        order = self.batch + self.rows + self.columns
        turned = x.reshape([shape[d] for d in order])
        return turned.transpose(sorted(range(len(order)), key=order.__getitem__))


def axes_of_leaves(
    tree: PyTree,
    numbers: Any,
    stacked: Any,
    who: str,
    name: str,
) -> list[MatrixAxes | None]:
    """For each leaf its axes; None for a leaf that is left to Adam.

    Args:
      tree: parameters or gradients.
      numbers: dimension numbers as `muon` takes them.
      stacked: which leaves have layers along axis 0, or None.
      who: the rule, for messages.
      name: of its argument with the dimension numbers.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if stacked is not None:
        stacks = selection(f"{who}: stacked", stacked, tree)
        pairs = zip(leaves, stacks, strict=True)
        return [_plain(x.ndim, int(stack)) for (_, x), stack in pairs]
    if numbers is None:
        return [_plain(x.ndim, 0) for _, x in leaves]
    given = _spread(name, numbers(tree) if callable(numbers) else numbers, tree)
    pairs = zip(leaves, given, strict=True)
    return [_axes(name, keystr(path), x, dims) for (path, x), dims in pairs]


def check_axes_of(numbers: Any, stacked: Any, name: str) -> None:
    """An error for two arguments that do not say which leaves are matrices.

    Args:
      numbers, stacked: as for `axes_of_leaves`.
      name: of the argument with the dimension numbers.
    """
    _check_numbers(numbers, name)
    check_selection("stacked", stacked)
    if numbers is not None and stacked is not None:
        raise ValueError(
            f"stacked={shown(stacked)} with {name}: both say which axes count layers; "
            "give one of them"
        )


def _check_numbers(numbers: Any, name: str) -> None:
    """TypeError for what no dimension numbers can be."""
    if numbers is None or (callable(numbers) and not _is_numbers(numbers)):
        return
    for x in jax.tree.leaves(numbers, is_leaf=_is_numbers):
        if not _is_numbers(x):
            raise wrong_type(name, numbers, _ALLOWED)
    if isinstance(numbers, str | int | float):
        raise wrong_type(name, numbers, _ALLOWED)


def _plain(ndim: int, layers: int) -> MatrixAxes | None:
    """The axes where a leaf, or each layer of it, has two."""
    if ndim - layers != 2:
        return None
    return MatrixAxes(tuple(range(layers)), (layers,), (layers + 1,))


def _is_numbers(x: Any) -> bool:
    # not by its class, which older versions of optax lack
    return hasattr(x, "reduction_axis") and hasattr(x, "output_axis")


def _spread(name: str, numbers: Any, tree: PyTree) -> list[Any]:
    """Dimension numbers, or None, of each leaf."""
    _check_numbers(numbers, name)
    ends = lambda x: x is None or _is_numbers(x)
    found: list[Any] = []
    try:
        add = lambda dims, part: found.extend([dims] * len(jax.tree.leaves(part)))
        jax.tree.map(add, numbers, tree, is_leaf=ends)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{name}={shown(numbers)}: not of the structure of "
            f"the parameters, {shown(tree)}, nor a prefix of it: {error}"
        ) from None
    return found


def _axes(name: str, path: str, x: Any, dims: Any) -> MatrixAxes | None:
    if dims is None:
        return None
    who = f"{name} of {path or 'the parameter'}, {shown(x)}"
    rows, columns = (
        _sorted_out(who, axes, x.ndim)
        for axes in (dims.reduction_axis, dims.output_axis)
    )
    if set(rows) & set(columns) or not rows or not columns:
        raise ValueError(
            f"{who}: {dims}: reduction and output have axes of their own, at least one "
            "each"
        )
    batch = tuple(d for d in range(x.ndim) if d not in rows + columns)
    return MatrixAxes(batch, rows, columns)


def _sorted_out(who: str, axes: Any, ndim: int) -> tuple[int, ...]:
    listed = (axes,) if isinstance(axes, int) else tuple(axes)
    if any(not -ndim <= d < ndim for d in listed):
        raise ValueError(f"{who}: axis {axes} of an array of {ndim} axes")
    return tuple(d % ndim for d in listed)
