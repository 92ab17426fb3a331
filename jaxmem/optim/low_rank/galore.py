"""`galore` and `scale_by_galore`: GaLore and Q-GaLore as optax transformations."""

from typing import Any, get_args

import optax
from jax.typing import ArrayLike

from jaxmem._checks import (
    check_axis_name,
    check_choice,
    check_int,
    check_scalar,
    wrong_type,
)
from jaxmem.optim.accumulation import chain_after
from jaxmem.optim.accumulation.devices import AxisName
from jaxmem.optim.low_rank.adam import AdamRule, EpsPlacement, adam
from jaxmem.optim.low_rank.decay import with_learning_rate
from jaxmem.optim.low_rank.galore_rule import GaLoreRule, plain
from jaxmem.optim.low_rank.leaves import check_projected
from jaxmem.optim.low_rank.low_rank_sum import accumulating
from jaxmem.optim.low_rank.projector import ProjectorRule
from jaxmem.optim.low_rank.sides import Projection
from jaxmem.optim.low_rank.stored import ProjectorDType
from jaxmem.optim.low_rank.subspace import Subspace


def scale_by_galore(
    rank: int = 128,
    gap: int = 200,
    scale: ArrayLike = 0.25,
    *,
    projection: Projection = "std",
    subspace: Subspace = "randomized",
    iterations: int = 1,
    inner: optax.GradientTransformation | None = None,
    eps_placement: EpsPlacement = "optax",
    projector_dtype: ProjectorDType = "float32",
    lazy: bool = False,
    projected: Any = None,
    micro_batches: int = 1,
    axis_name: AxisName | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Runs an optimizer on projected gradients (GaLore, Q-GaLore).

    For a matrix with gradient G [m, n] and a projector with orthonormal rows, on the
    right B [rank, n] or on the left A [rank, m]::

      every `gap` steps:  B (A) <- the first right (left) singular vectors of G
      R = G B^T  or  A G  or  A G B^T
      update = scale * inner(R) B  or  scale * A^T inner(R)  or  scale * A^T inner(R) B

    The first step makes the first projector. Moments stay as they are when the
    projector changes; so that they still mean something then, each new vector is turned
    to the half space of the old one (the sign of a singular vector is arbitrary). A
    leaf with more than two axes is a stack of matrices, the last two axes of it, each
    with a projector of its own. A leaf that is not projected takes the inner rule.

    **What it approximates.** The update lies in a subspace of dimension `rank`: what of
    the gradient lies outside is dropped until a later projector has it.

    **State.** For a <= b the axes of a matrix, in numbers: "std" projects the shorter
    axis, a r for the projector and b r for each array of the inner state; "reverse_std"
    b r and a r; "full" (a + b) r and r^2. Numbers of the inner state have its own
    dtype, float32 for Adam; those of the projector 4, 2, 1 or 1/2 byte, and 5 bytes
    more for each group of 256 in "int8" and "int4".

    **Micro-batches.** `jaxmem.microbatch` sums the gradients of micro-batches as it
    does for any transformation, with nothing to set here: one accumulator as large as
    the parameters, and the result of the whole batch. With `micro_batches` above 1 the
    state has an accumulator of the size of R in its place, and gradients are projected
    as they come (in the backward pass, by layers, where `jaxmem.schedule` can). Between
    two refreshes this is the same but for rounding. In a mini-batch that begins with a
    refresh, the first micro-batch's gradient alone makes the projector, and all
    gradients of the mini-batch, the first too, are projected by it: the sum is again
    exact, and the subspace is that of one micro-batch. A micro-batch that is skipped
    makes no projector; the next one does.

    **On many devices.** Under `jax.jit` with sharded arrays there is nothing to do.
    Under `jax.shard_map` with an `axis_name` each device adds up its own micro-batches
    in the subspace, and one all-reduce at the end of the mini-batch takes the mean of
    these sums. A refresh needs an all-reduce of the gradient itself: the projector is
    that of the first micro-batch of all devices. How to call it is as for
    `scale_by_adama`: `jaxmem.microbatch(axis_name=...)` does, or
    `jaxmem.optim.start_step`, `accumulate_step` and `apply_step`.

    **Numbers that are not finite** go into R and the moments as they do in Adam, and,
    at a refresh, into the projector, where they stay until the next: skip such
    gradients (`jaxmem.microbatch(skip_nonfinite=...)`, `optax.apply_if_finite`).

    Args:
      rank: dimension of the subspace, at most the shorter axis of each projected leaf.
      gap: steps from one refresh of the projectors to the next. The reference has 200;
        500 for 7B parameters.
      scale: factor of updates that are projected back, 0.25 in the reference.
      projection: "std", the shorter axis; "reverse_std", the longer one; "left" or
        "right"; "full", both.
      subspace: "randomized", subspace iteration from the old projector, two QR
        decompositions [m, rank] an iteration; "svd", exact singular vectors, for which
        a decomposition of the whole gradient is computed (a layer at a time where
        `jaxmem.schedule` releases it).
      iterations: of the former. Its first projector begins at random vectors.
      inner: any optax transformation that asks for no parameters, on R. Adam by
        default, with decays 0.9 and 0.999 and eps 1e-6, in float32.
      eps_placement: of that Adam: "optax" adds eps after the bias correction, as
        `optax.scale_by_adam` does, "reference" before it, as GaLore's AdamW does:
        update = sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps).
      projector_dtype: "float32", "bfloat16", "gradient", or affine codes with a scale
        and a zero for 256 numbers of a vector (all of it if 256 does not divide it):
        "int8", each number off by at most 1/255 of the group's range, "int4", 1/15.
        "gradient" is the dtype of the parameters that `init` is given, which their
        gradients have too, and float32 for wider ones.
      lazy: Q-GaLore's lazy subspaces. If the mean cosine between the first vectors of
        successive projectors is at least 0.4 over the last five refreshes, the gap of
        that matrix doubles, at each such refresh. All matrices of a stacked leaf are
        decomposed where one of them is due. The first vector of "randomized" is near
        the first singular vector only where the latter stands out.
      projected: which leaves are projected; by default all with two axes or more.
        Patterns of paths as `jaxmem.trainable` takes them, a function of the path, a
        list of these, or a tree of bools. The bias of stacked layers [L, n] looks like
        a matrix: leave it out.
      micro_batches: 1, or how many micro-batches of a mini-batch are added up in the
        subspace. `jaxmem.microbatch` gives its own n.
      axis_name: mesh axis, or axes, of the `jax.shard_map` (or `vmap`) this runs in,
        whose devices have micro-batches of their own, see above.
      seed: of the random vectors.

    Returns:
      An `optax.GradientTransformationExtraArgs` with a `GaLoreState`, or with a
      `GaLoreSumState` for several `micro_batches` or an `axis_name`. Updates have the
      gradients' dtypes. `init` shards the state of sharded parameters along the axes
      that it has in common with them. Extra arguments of `update` go to `inner`.

    Raises:
      ValueError: an argument out of its range; from `init` and `update`, a rank larger
        than a matrix, a chosen leaf with fewer than two axes, an axis that "int4"
        cannot store, a state of other shapes; an `inner` that needs parameters.
      TypeError: an argument, a leaf or a state of another kind.

    Source:
      Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank
      Projection", arXiv 2403.03507, algorithm 2. Zhang et al., "Q-GaLore", arXiv
      2407.08296, sections 3.2 and 3.3. Halko et al., arXiv 0909.4061, algorithm 4.4.
      Turned vectors and accumulation in the subspace are in none of them.

    Example::

      rule = jaxmem.optim.scale_by_galore(
          256, 500, projection="reverse_std", projected="**/kernel"
      )
      tx = optax.chain(rule, optax.scale_by_learning_rate(5e-3))
    """
    chosen = rank, gap, subspace, iterations, projector_dtype, lazy, seed
    projector = ProjectorRule(projection, *chosen).checked()
    if projector.lazy and projection == "full":
        raise ValueError(
            'lazy=True with projection="full": lazy subspaces compare the first vector '
            'of one projector with the next; one of "std", "reverse_std", "left", '
            '"right"'
        )
    rule = GaLoreRule(
        "galore",
        projector,
        check_scalar("scale", scale, above=0),
        check_projected("galore", projected),
        _inner(inner, eps_placement),
    )
    n = check_int("micro_batches", micro_batches, 1)
    axes = check_axis_name("axis_name", axis_name)
    return accumulating(rule, n, axes) if n > 1 or axes else plain(rule)


def galore(
    learning_rate: ArrayLike | optax.Schedule,
    rank: int = 128,
    gap: int = 200,
    scale: ArrayLike = 0.25,
    *,
    projection: Projection = "std",
    subspace: Subspace = "randomized",
    iterations: int = 1,
    inner: optax.GradientTransformation | None = None,
    eps_placement: EpsPlacement = "optax",
    projector_dtype: ProjectorDType = "float32",
    lazy: bool = False,
    projected: Any = None,
    micro_batches: int = 1,
    axis_name: AxisName | None = None,
    seed: int = 0,
    weight_decay: ArrayLike | optax.Schedule = 0.0,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """GaLore with a learning rate and decoupled weight decay.

    `scale_by_galore` has the rule, the state in bytes, and what micro-batches do::

      p <- p - learning_rate * update
      p <- p - learning_rate * weight_decay * p    of the new p, as the reference

    Args:
      learning_rate: a scalar, or a schedule of the number of steps; 0.01 in the
        reference, 0.005 for 7B parameters.
      rank, gap, scale, projection, subspace, iterations: see `scale_by_galore`.
      inner, eps_placement, projector_dtype, lazy, projected: see there too.
      micro_batches, axis_name, seed: see there too.
      weight_decay: a scalar or a schedule.
      mask: where to decay the weights: a tree of bools, or a function of the parameters
        that gives one.

    Returns:
      An `optax.GradientTransformationExtraArgs` with a chain's state.

    Raises:
      ValueError, TypeError: as `scale_by_galore`; and from `update`, with weight decay,
        without params.

    Source:
      Zhao et al., arXiv 2403.03507; the reference's default values.

    Example::

      tx = jaxmem.optim.galore(0.01, rank=128, projected="**/kernel", micro_batches=4)
      step = jaxmem.microbatch(loss_fn, tx, 4)  # no gradient accumulator
    """
    rule = scale_by_galore(
        rank,
        gap,
        scale,
        projection=projection,
        subspace=subspace,
        iterations=iterations,
        inner=inner,
        eps_placement=eps_placement,
        projector_dtype=projector_dtype,
        lazy=lazy,
        projected=projected,
        micro_batches=micro_batches,
        axis_name=axis_name,
        seed=seed,
    )
    tail = with_learning_rate(learning_rate, weight_decay, mask)
    if micro_batches == 1 and not axis_name:
        return optax.chain(rule, tail)
    return chain_after(rule, optax.chain(tail), micro_batches)


def _inner(inner: Any, eps_placement) -> optax.GradientTransformationExtraArgs:
    check_choice("eps_placement", eps_placement, get_args(EpsPlacement))
    if inner is None:
        inner = adam(AdamRule(0.9, 0.999, 1e-6), eps_placement)
    elif eps_placement != "optax":
        raise ValueError(
            f"eps_placement={eps_placement!r} with an inner transformation: it is that "
            "of the Adam which runs without one"
        )
    if not (callable(getattr(inner, "init", None)) and hasattr(inner, "update")):
        raise wrong_type("inner", inner, "an optax.GradientTransformation")
    return optax.with_extra_args_support(inner)
