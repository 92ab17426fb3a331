"""APOLLO: Adam's step lengths from a random projection, on the whole gradient."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int32, PyTree

from jaxmem._checks import check_choice, check_float, check_int, check_scalar
from jaxmem.optim._by_keys import held_by_keys
from jaxmem.optim.low_rank.adam import AdamRule
from jaxmem.optim.low_rank.checks import check_state
from jaxmem.optim.low_rank.decay import with_learning_rate
from jaxmem.optim.low_rank.leaves import ChosenLeaf, check_projected
from jaxmem.optim.low_rank.limiter import limit, ratio_of_norms
from jaxmem.optim.low_rank.moments import LeafMoments, MomentsRule, by_leaves
from jaxmem.optim.low_rank.noise import gaussian, seeds_of
from jaxmem.optim.low_rank.sides import Vectors, low_rank_axis, project

Scaling = Literal["channel", "tensor"]


class ApolloState(NamedTuple):
    """State of `scale_by_apollo`.

    Attributes:
      count: int32[], steps.
      moments: at each leaf a `LeafMoments`.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    moments: PyTree


def random_projector(
    seed: int,
    path: str,
    index: Int32[Array, ""],
    rank: int,
    shape: tuple[int, ...],
) -> Vectors:
    """APOLLO's projector of a leaf: normal numbers of variance 1 / rank.

    It is the same wherever and whenever it is computed: a function of its arguments
    alone, and for a layer of a stack of the layer's place in it.

    Args:
      seed: of the optimizer.
      path: of the leaf.
      index: which projector, the number of steps over the gap.
      rank: rows of the projector.
      shape: of the leaf.

    Returns:
      On the shorter axis of its matrices.
    """
    *batch, m, n = shape
    seeds = seeds_of(seed, path, index, tuple(batch))
    matrix = gaussian(seeds, rank, min(m, n)) * rank**-0.5
    return Vectors(None, matrix) if m >= n else Vectors(matrix, None)


def scale_by_apollo(
    rank: int = 256,
    gap: int = 200,
    scale: ArrayLike = 1.0,
    *,
    scaling: Scaling = "channel",
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-6,
    growth: float = 1.01,
    projected: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    r"""Scales gradients by Adam's step lengths, found in a random subspace (APOLLO).

    For a matrix with gradient G [m, n], and a random P [rank, min(m, n)] of variance
    1 / rank, drawn anew every `gap` steps::

      R = G P^T (m >= n)  or  P G (m < n)
      m <- b1 m + (1 - b1) R,  v <- b2 v + (1 - b2) R^2,  N = m / (sqrt(v) + eps)
      s = |N| / (|R| + 1e-8)     "channel": along the rank, a row (column) of G each;
                                 "tensor": of the whole matrix
      U = s G,  l = max(|U| / (|U'| + 1e-8), growth) / growth,  U' <- U / l
      update = sqrt(scale) sqrt(1 - b2^t) / (1 - b1^t) U / l

    where ``|U'|`` is the norm of the step before; the first step, and one after a
    gradient of zeros, has l = 1. A leaf with more than two axes is a stack of matrices,
    each with a P, an s and an l of its own. Other leaves take Adam, with eps as here.

    **What it approximates.** Directions are the gradient's, without momentum; the
    lengths are Adam's in expectation over P.

    **State.** 8 rank / min(m, n) bytes an element, and 4 bytes a matrix. P is computed
    where it is used, of (seed, leaf, layer, count // gap), and takes nothing.

    **Micro-batches.** The update needs the gradient of the whole mini-batch, not R
    alone, so nothing is accumulated in the state: `jaxmem.microbatch` sums gradients.

    **Numbers that are not finite** go into the moments and the norm as they do in Adam:
    skip such gradients (`jaxmem.microbatch(skip_nonfinite=...)`).

    Args:
      rank: rows of P, at most the shorter axis of each projected leaf.
      gap: steps for which P is the same.
      scale: its root multiplies the updates.
      scaling: "channel" or "tensor".
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the root of the second moment, before the bias correction.
      growth: by what a matrix's update may be longer than the one before, at least 1;
        infinity for no limit.
      projected: which leaves, as for `scale_by_galore`.
      seed: of P.

    Returns:
      An `optax.GradientTransformation` with an `ApolloState`.

    Raises:
      ValueError, TypeError: as `scale_by_galore`.

    Source:
      Zhu et al., "APOLLO: SGD-like Memory, AdamW-level Performance", arXiv 2412.05270,
      algorithm 1; the order of limiter and correction is the reference's.

    Example::

      rule = jaxmem.optim.scale_by_apollo(256, projected="**/kernel")
      tx = optax.chain(rule, optax.scale(-0.01))
    """
    check_choice("scaling", scaling, get_args(Scaling))
    gap = check_int("gap", gap, 1)
    seed = check_int("seed", seed)
    factor = jnp.sqrt(jnp.asarray(check_scalar("scale", scale, above=0), jnp.float32))
    rule = MomentsRule(
        "apollo",
        AdamRule(b1, b2, eps).checked(),
        check_int("rank", rank, 1),
        "std",
        check_projected("apollo", projected),
        check_float("growth", growth, at_least=1, infinite=True),
    )

    def init(params: PyTree) -> ApolloState:
        leaves = rule.leaves(params)
        moments = leaves.tree_of([rule.init(leaf) for leaf in leaves])
        return ApolloState(jnp.zeros((), jnp.int32), moments)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, ApolloState]:
        del params
        check_state("apollo", init, updates, state)
        count = jnp.asarray(optax.safe_increment(state.count))
        corrected = rule.adam.correction(count)

        def one(leaf: ChosenLeaf, old: LeafMoments):
            g = leaf.value.astype(jnp.float32)
            if not leaf.projected:
                ratio, new = rule.step(g, old)
                return (corrected * ratio).astype(leaf.value.dtype), new
            by = random_projector(
                seed, leaf.path, state.count // gap, rule.rank, g.shape
            )
            update, new = _scaled(rule, g, project(g, by), old, scaling)
            return (factor * corrected * update).astype(leaf.value.dtype), new

        with jax.named_scope("jaxmem.apollo"):
            new, moments = by_leaves(one, rule.leaves(updates), state.moments)
        return new, ApolloState(count, moments)

    return held_by_keys(optax.GradientTransformation(init, update))


def _scaled(rule: MomentsRule, g, low, old: LeafMoments, scaling: Scaling):
    ratio, new = rule.step(low, old)
    along = low_rank_axis(rule.sides(g.shape))
    axes = (along,) if scaling == "channel" else (-2, -1)
    update = ratio_of_norms(ratio, low, axes) * g
    assert old.norm is not None  # of a projected leaf
    limited, norm = limit(update, old.norm, rule.growth)
    return limited * update, new._replace(norm=norm)


def apollo(
    learning_rate: ArrayLike | optax.Schedule,
    rank: int = 256,
    gap: int = 200,
    scale: ArrayLike = 1.0,
    *,
    scaling: Scaling = "channel",
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-6,
    growth: float = 1.01,
    projected: Any = None,
    seed: int = 0,
    weight_decay: ArrayLike | optax.Schedule = 0.0,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """APOLLO with a learning rate and decoupled weight decay.

    `scale_by_apollo` has the rule and the state in bytes; then::

      p <- p - learning_rate * update
      p <- p - learning_rate * weight_decay * p    of the new p, as the reference

    Args:
      learning_rate: a scalar, or a schedule of the number of steps; 0.01 in the paper.
      rank, gap, scale, scaling, b1, b2, eps, growth, projected, seed: see
        `scale_by_apollo`.
      weight_decay: a scalar or a schedule.
      mask: where to decay the weights: a tree of bools, or a function of the parameters
        that gives one.

    Returns:
      An `optax.GradientTransformationExtraArgs` with a chain's state.

    Raises:
      ValueError, TypeError: as `scale_by_apollo`; and from `update`, with weight decay,
        without params.

    Source:
      Zhu et al., arXiv 2412.05270.

    Example::

      tx = jaxmem.optim.apollo(0.01, rank=256, projected="**/kernel")
    """
    rule = scale_by_apollo(
        rank,
        gap,
        scale,
        scaling=scaling,
        b1=b1,
        b2=b2,
        eps=eps,
        growth=growth,
        projected=projected,
        seed=seed,
    )
    return optax.chain(rule, with_learning_rate(learning_rate, weight_decay, mask))


def apollo_mini(
    learning_rate: ArrayLike | optax.Schedule,
    gap: int = 200,
    scale: ArrayLike = 128.0,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """APOLLO-Mini: `apollo` of rank 1, with one step length a matrix.

    State: 8 / min(m, n) bytes an element, and 4 bytes a matrix.

    Args:
      learning_rate: a scalar, or a schedule of the number of steps; 0.01 in the paper.
      gap: steps for which the random vector is the same.
      scale: its root multiplies the updates.
      **options: b1, b2, eps, growth, projected, seed, weight_decay and mask of
        `apollo`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with a chain's state.

    Raises:
      ValueError, TypeError: as `apollo`.

    Source:
      Zhu et al., arXiv 2412.05270, section 4.2.

    Example::

      tx = jaxmem.optim.apollo_mini(0.01, projected="**/kernel")
    """
    return apollo(learning_rate, 1, gap, scale, scaling="tensor", **options)
