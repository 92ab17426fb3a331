"""Adam's moments of projected gradients, and of the leaves that are not projected."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, PyTree

from jaxmem.optim.low_rank.adam import AdamRule
from jaxmem.optim.low_rank.leaves import ChosenLeaf, Leaves, leaves_of
from jaxmem.optim.low_rank.sides import Side, sides_of
from jaxmem.optim.low_rank.zeros import low_rank_zeros, zeros_along


class LeafMoments(NamedTuple):
    """What is kept of one leaf.

    Attributes:
      mu: first moment of the projected gradient, or of the whole one, float32.
      nu: second moment.
      norm: float32[...], of each matrix's last limited update; None for a leaf that is
        not projected.
    """

    mu: Float32[Array, "..."]
    nu: Float32[Array, "..."]
    norm: Float32[Array, "*batch"] | None


@dataclass(frozen=True)
class MomentsRule:
    """Moments in the subspace, for an update that needs the whole gradient too."""

    name: str
    adam: AdamRule
    rank: int
    projection: Any
    projected: Any
    growth: float

    def leaves(self, tree: PyTree) -> Leaves:
        """The leaves, with which of them are projected."""
        return leaves_of(self.name, tree, self.projected, self.rank)

    def sides(self, shape: tuple[int, ...]) -> tuple[Side, ...]:
        """Which axis of a matrix is projected."""
        return sides_of(self.projection, *shape[-2:])

    def init(self, leaf: ChosenLeaf) -> LeafMoments:
        """Zeros."""
        p = leaf.value
        if not leaf.projected:
            zeros = lambda: jnp.zeros_like(p, dtype=jnp.float32)
            return LeafMoments(zeros(), zeros(), None)
        zeros = lambda: low_rank_zeros(p, self.sides(p.shape), self.rank)
        batch = p.shape[:-2]
        norm = zeros_along(p, batch, "float32", tuple(range(len(batch))))
        return LeafMoments(zeros(), zeros(), norm)

    def step(
        self, g: Float32[Array, "..."], state: LeafMoments
    ) -> tuple[Float32[Array, "..."], LeafMoments]:
        """m / (sqrt(v) + eps) with `g` in the moments, and the state with them."""
        m, v = self.adam.moments(g, state.mu, state.nu)
        return self.adam.ratio(m, v), state._replace(mu=m, nu=v)


def by_leaves(
    fn: Callable[..., tuple[Any, ...]], leaves: Leaves, *trees: PyTree
) -> tuple[PyTree, ...]:
    """`fn` of each leaf and of what the trees have there; a tree for each output."""
    columns = zip(leaves, *[leaves.of(tree) for tree in trees], strict=True)
    rows = [fn(*column) for column in columns]
    return tuple(leaves.tree_of([*column]) for column in zip(*rows, strict=True))
