"""Which leaves of the parameters are projected."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from jaxmem._checks import shown, wrong_type
from jaxmem._paths import check_selection, selection


class ChosenLeaf(NamedTuple):
    """A leaf of the parameters, or of what has their structure."""

    path: str
    value: Any
    projected: bool


@dataclass(frozen=True)
class Leaves:
    """All leaves, and the way back to the tree."""

    leaves: list[ChosenLeaf]
    tree: Any

    def __iter__(self) -> Iterator[ChosenLeaf]:
        return iter(self.leaves)

    def of(self, other: Any) -> list[Any]:
        """What stands in another tree at these leaves; it may be a whole branch."""
        return self.tree.flatten_up_to(other)

    def tree_of(self, values: list[Any]) -> Any:
        """The tree with these values at its leaves."""
        return self.tree.unflatten(values)


def check_projected(name: str, projected: Any) -> Any:
    """TypeError for what is neither None nor a choice of leaves."""
    check_selection(f"{name}: projected", projected)
    return projected


def leaves_of(name: str, tree: Any, projected: Any, rank: int) -> Leaves:
    """The leaves of a tree, of which those that `projected` chooses are projected.

    Args:
      name: of the optimizer, for messages.
      tree: parameters or gradients.
      projected: as `scale_by_galore` takes it.
      rank: of the projection.

    Raises:
      TypeError: a leaf that is no real floating array.
      ValueError: a chosen leaf with fewer than two axes, or too small for the rank.
    """
    paths = [(keystr(path), x) for path, x in jax.tree.leaves_with_path(tree)]
    for path, x in paths:
        _check_floating(name, path, x)
    chosen = _chosen(name, tree, projected)
    for (path, x), wanted in zip(paths, chosen, strict=True):
        if wanted:
            _check_matrix(name, path, x, rank)
    pairs = zip(paths, chosen, strict=True)
    leaves = [ChosenLeaf(path, x, wanted) for (path, x), wanted in pairs]
    return Leaves(leaves, jax.tree.structure(tree))


def _chosen(name: str, tree, projected) -> list[bool]:
    if projected is None:
        return [x.ndim >= 2 for x in jax.tree.leaves(tree)]
    return selection(f"{name}: projected", projected, tree)


def _check_floating(name: str, path: str, x) -> None:
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise wrong_type(
            f"{name}: the leaf {path or 'itself'}",
            x,
            "a real floating array; leave others out with optax.masked",
        )


def _check_matrix(name: str, path: str, x, rank: int) -> None:
    out = "leave it out with projected=..., and it takes the inner rule as it is"
    if x.ndim < 2:
        raise ValueError(
            f"{name}: projected chooses the leaf {path or 'itself'}, {shown(x)}, which "
            f"has fewer than two axes: {out}"
        )
    if rank > min(x.shape[-2:]):
        m, n = x.shape[-2:]
        raise ValueError(
            f"{name}: rank={rank} is larger than the leaf {path or 'itself'}, "
            f"{shown(x)}: its matrices are {m} x {n}; {out}"
        )
