"""Fira: GaLore, with the rest of the gradient in steps of the subspace's length."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int32, PyTree

from jaxmem._checks import (
    check_choice,
    check_float,
    check_scalar,
)
from jaxmem.optim._by_keys import held_by_keys
from jaxmem.optim.low_rank.adam import AdamRule
from jaxmem.optim.low_rank.checks import check_state
from jaxmem.optim.low_rank.decay import with_learning_rate
from jaxmem.optim.low_rank.leaves import ChosenLeaf, check_projected
from jaxmem.optim.low_rank.limiter import limit, ratio_of_norms
from jaxmem.optim.low_rank.moments import LeafMoments, MomentsRule, by_leaves
from jaxmem.optim.low_rank.projector import ProjectorRule, ProjectorState
from jaxmem.optim.low_rank.sides import low_rank_axis, project, project_back
from jaxmem.optim.low_rank.stored import ProjectorDType
from jaxmem.optim.low_rank.subspace import Subspace

_PROJECTIONS = ("std", "reverse_std", "left", "right")


class FiraState(NamedTuple):
    """State of `scale_by_fira`.

    Attributes:
      count: int32[], steps.
      projectors: at each projected leaf a `ProjectorState`, None at others.
      moments: at each leaf a `LeafMoments`.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    projectors: PyTree
    moments: PyTree


@dataclass(frozen=True)
class FiraRule:
    """The parts of an update."""

    projector: ProjectorRule
    moments: MomentsRule
    scale: ArrayLike

    def init(self, params: PyTree) -> FiraState:
        """The state before the first step."""
        leaves = self.moments.leaves(params)
        made = [
            self.projector.init(x.value, x.path) if x.projected else None
            for x in leaves
        ]
        moments = [self.moments.init(x) for x in leaves]
        zero = jnp.zeros((), jnp.int32)
        return FiraState(zero, leaves.tree_of(made), leaves.tree_of(moments))

    def step(
        self, leaf: ChosenLeaf, kept: ProjectorState | None, old: LeafMoments, count
    ) -> tuple[Array, ProjectorState | None, LeafMoments]:
        """(update without bias correction, projectors, moments) of a leaf."""
        g = leaf.value.astype(jnp.float32)
        if kept is None:
            ratio, new = self.moments.step(g, old)
            return ratio, None, new
        kept = self.projector.refreshed(leaf.value, kept, count, leaf.path)
        by = self.projector.vectors(kept, g.shape)
        scale = jnp.asarray(self.scale, jnp.float32)
        low = project(g, by)
        ratio, new = self.moments.step(low, old)
        axis = low_rank_axis(self.moments.sides(g.shape))
        phi = ratio_of_norms(ratio, low, (axis,))
        rest = phi * (g - scale * project_back(low, by))
        assert old.norm is not None  # of a projected leaf
        limited, norm = limit(rest, old.norm, self.moments.growth)
        update = scale * project_back(ratio, by) + limited * rest
        return update, kept, new._replace(norm=norm)


def scale_by_fira(
    rank: int = 128,
    gap: int = 200,
    scale: ArrayLike = 0.25,
    *,
    projection: str = "std",
    subspace: Subspace = "randomized",
    iterations: int = 1,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-6,
    growth: float = 1.01,
    projector_dtype: ProjectorDType = "float32",
    lazy: bool = False,
    projected: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    r"""Adam in a subspace, and the rest of the gradient scaled alike (Fira).

    With the projector, R and the back projection of `scale_by_galore`, for a matrix
    that is projected on the right (on the left in the same way)::

      m <- b1 m + (1 - b1) R,  v <- b2 v + (1 - b2) R^2,  N = m / (sqrt(v) + eps)
      phi = |N| / (|R| + 1e-8)                along the rank: a row (column) of G each
      E = phi (G - scale R B),  l = max(|E| / (|E'| + 1e-8), growth) / growth
      update = sqrt(1 - b2^t) / (1 - b1^t) (scale N B + E / l)

    where ``|E'|`` is the norm of E / l of the step before; the first step, and one
    after ``|E'| = 0``, has l = 1. `scale` multiplies what is subtracted from G, as in
    the reference: with scale=1 it is all of the gradient in the subspace, as in the
    paper.
    A leaf with more than two axes is a stack of matrices, each with factors and limits
    of its own. Leaves that are not projected take Adam, with eps as here.

    **What it approximates.** The part of the gradient outside the subspace takes steps
    without momentum, of the mean length that its row (column) has in the subspace.

    **State.** GaLore's with Adam, 4 (a r + 2 b r) / (a b) bytes an element for a
    projector in float32 and axes a <= b, and 4 bytes a matrix.

    **Micro-batches.** E needs the gradient of the whole mini-batch, so nothing is
    accumulated in the state: `jaxmem.microbatch` sums gradients, as for any optimizer.

    **Numbers that are not finite**: as `scale_by_galore` says.

    Args:
      rank, gap, subspace, iterations, projector_dtype, lazy, projected, seed: see
        `scale_by_galore`.
      scale: factor of updates that are projected back.
      projection: "std", "reverse_std", "left" or "right".
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the root of the second moment, before the bias correction.
      growth: by what a matrix's E may be longer than the one before, at least 1;
        infinity for no limit.

    Returns:
      An `optax.GradientTransformation` with a `FiraState`.

    Raises:
      ValueError, TypeError: as `scale_by_galore`.

    Source:
      Chen et al., "Fira: Can We Achieve Full-rank Training of LLMs Under Low-rank
      Constraint?", arXiv 2410.01623, algorithm 1; `scale` as in the reference.

    Example::

      rule = jaxmem.optim.scale_by_fira(128, projected="**/kernel")
      tx = optax.chain(rule, optax.scale(-0.01))
    """
    check_choice("projection", projection, _PROJECTIONS)
    chosen = rank, gap, subspace, iterations, projector_dtype, lazy, seed
    projector = ProjectorRule(projection, *chosen).checked()  # pyright: ignore[reportArgumentType]
    moments = MomentsRule(
        "fira",
        AdamRule(b1, b2, eps).checked(),
        projector.rank,
        projection,
        check_projected("fira", projected),
        check_float("growth", growth, at_least=1, infinite=True),
    )
    rule = FiraRule(projector, moments, check_scalar("scale", scale, above=0))
    return _transformation(rule)


def _transformation(rule: FiraRule) -> optax.GradientTransformation:
    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, FiraState]:
        del params
        check_state("fira", rule.init, updates, state)
        count = jnp.asarray(optax.safe_increment(state.count))
        corrected = rule.moments.adam.correction(count)

        def one(leaf: ChosenLeaf, kept: ProjectorState | None, old: LeafMoments):
            update, *new = rule.step(leaf, kept, old, state.count)
            return (corrected * update).astype(leaf.value.dtype), *new

        with jax.named_scope("jaxmem.fira"):
            leaves = rule.moments.leaves(updates)
            new = by_leaves(one, leaves, state.projectors, state.moments)
        return new[0], FiraState(count, *new[1:])

    return held_by_keys(optax.GradientTransformation(rule.init, update))


def fira(
    learning_rate: ArrayLike | optax.Schedule,
    rank: int = 128,
    gap: int = 200,
    scale: ArrayLike = 0.25,
    *,
    weight_decay: ArrayLike | optax.Schedule = 0.0,
    mask: Any = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Fira with a learning rate and decoupled weight decay.

    `scale_by_fira` has the rule and the state in bytes; then::

      p <- p - learning_rate * update
      p <- p - learning_rate * weight_decay * p    of the new p, as the reference

    Args:
      learning_rate: a scalar, or a schedule of the number of steps; 0.01 in the
        reference.
      rank, gap, scale: see `scale_by_fira`.
      weight_decay: a scalar or a schedule.
      mask: where to decay the weights: a tree of bools, or a function of the parameters
        that gives one.
      **options: all others of `scale_by_fira`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with a chain's state.

    Raises:
      ValueError, TypeError: as `scale_by_fira`; and from `update`, with weight decay,
        without params.

    Source:
      Chen et al., arXiv 2410.01623.

    Example::

      tx = jaxmem.optim.fira(0.01, rank=128, projected="**/kernel")
    """
    rule = scale_by_fira(rank, gap, scale, **options)
    return optax.chain(rule, with_learning_rate(learning_rate, weight_decay, mask))
