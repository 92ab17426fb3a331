"""GaLore: an optimizer in the subspace of the gradient's largest singular values."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float32, Int32, PyTree

from jaxmem._checks import shown
from jaxmem.optim._by_keys import held_by_keys
from jaxmem.optim.accumulation import accumulates
from jaxmem.optim.low_rank.checks import check_state
from jaxmem.optim.low_rank.leaves import ChosenLeaf, Leaves, leaves_of
from jaxmem.optim.low_rank.projector import ProjectorRule, ProjectorState
from jaxmem.optim.low_rank.sides import project, project_back, sides_of
from jaxmem.optim.low_rank.zeros import low_rank_zeros


class GaLoreState(NamedTuple):
    """State of `scale_by_galore`.

    Attributes:
      count: int32[], steps.
      projectors: at each projected leaf a `ProjectorState`, None at others.
      inner: of the inner transformation, for parameters in float32 that are as large as
        the projected gradients.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    projectors: PyTree
    inner: Any


@dataclass(frozen=True)
class GaLoreRule:
    """The steps of an update, for one mini-batch or for several calls."""

    name: str
    projector: ProjectorRule
    scale: ArrayLike
    projected: Any
    inner: optax.GradientTransformationExtraArgs

    def leaves(self, tree: PyTree) -> Leaves:
        """The leaves, with which of them are projected."""
        return leaves_of(self.name, tree, self.projected, self.projector.rank)

    def init(self, params: PyTree) -> GaLoreState:
        """The state before the first step."""
        leaves = self.leaves(params)
        projectors = [
            self.projector.init(x.value, x.path) if x.projected else None
            for x in leaves
        ]
        inner: Any = self.inner.init(self.zeros(params))
        if accumulates(inner):
            raise ValueError(
                f"{self.name}: inner={shown(inner)} accumulates gradients of its own; "
                "an inner transformation takes those of whole mini-batches"
            )
        return GaLoreState(jnp.zeros((), jnp.int32), leaves.tree_of(projectors), inner)

    def zeros(self, params: PyTree) -> PyTree:
        """Zeros as large as the projected gradients, in float32."""
        leaves = self.leaves(params)
        return leaves.tree_of([self._zeros_of(x) for x in leaves])

    def check(self, updates: PyTree, state: Any) -> None:
        """Errors for a state that `init` has not made of such parameters."""
        check_state(self.name, self.init, updates, state)

    def refreshed(
        self,
        leaf: ChosenLeaf,
        state: ProjectorState | None,
        count,
        keep=None,
        axes: tuple[str, ...] = (),
    ) -> ProjectorState | None:
        """The projectors, computed again from this gradient where they are due."""
        if state is None:
            return None
        how = leaf.path, keep, axes
        return self.projector.refreshed(leaf.value, state, count, *how)

    def project(
        self, leaf: ChosenLeaf, state: ProjectorState | None
    ) -> Float32[Array, "..."]:
        """The projected gradient; the gradient itself where there is no projector."""
        if state is None:
            return leaf.value.astype(jnp.float32)
        by = self.projector.vectors(state, leaf.value.shape)
        return project(leaf.value, by)

    def project_back(
        self, low: Float32[Array, "..."], leaf: ChosenLeaf, state: ProjectorState | None
    ) -> Array:
        """The update of a leaf, of that in the subspace."""
        if state is None:
            return low.astype(leaf.value.dtype)
        by = self.projector.vectors(state, leaf.value.shape)
        scale = jnp.asarray(self.scale, jnp.float32)
        return (scale * project_back(low, by)).astype(leaf.value.dtype)

    def in_subspace(self, low: PyTree, state: GaLoreState, extra) -> tuple[PyTree, Any]:
        """The inner transformation's updates and state."""
        try:
            # not the parameters, which are of other shapes
            return self.inner.update(low, state.inner, None, **extra)
        except ValueError as error:
            if "params" not in str(error):
                raise
            raise ValueError(
                f"{self.name}: inner asks for params, and in the subspace there are "
                f"none: weight decay, for one, is an argument of its own ({error})"
            ) from error

    def _zeros_of(self, leaf: ChosenLeaf):
        if not leaf.projected:
            return jnp.zeros_like(leaf.value, dtype=jnp.float32)
        sides = sides_of(self.projector.projection, *leaf.value.shape[-2:])
        return low_rank_zeros(leaf.value, sides, self.projector.rank)


def plain(rule: GaLoreRule) -> optax.GradientTransformationExtraArgs:
    """The transformation that takes a whole mini-batch's gradient."""

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, GaLoreState]:
        del params
        rule.check(updates, state)
        with jax.named_scope(f"jaxmem.{rule.name}"):
            leaves = rule.leaves(updates)
            pairs = zip(leaves, leaves.of(state.projectors), strict=True)
            kept = [rule.refreshed(leaf, s, state.count) for leaf, s in pairs]
            low = [rule.project(x, s) for x, s in zip(leaves, kept, strict=True)]
            low, inner = rule.in_subspace(leaves.tree_of(low), state, extra)
            back = [
                rule.project_back(u, leaf, s)
                for u, leaf, s in zip(leaves.of(low), leaves, kept, strict=True)
            ]
        count = jnp.asarray(optax.safe_increment(state.count))
        return leaves.tree_of(back), GaLoreState(count, leaves.tree_of(kept), inner)

    return held_by_keys(optax.GradientTransformationExtraArgs(rule.init, update))
