"""`shampoo`: blocked and grafted Shampoo, as optax has optimizers."""

from collections.abc import Callable
from typing import Any, get_args

import optax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from jaxmem._checks import check_bool, check_choice, check_int
from jaxmem.optim.factored.arguments import decay, decayed_rate, number
from jaxmem.optim.low_bit.low_bit import LowBit
from jaxmem.optim.preconditioned.grafting import Grafting, GraftingRule
from jaxmem.optim.preconditioned.leaves import (
    checked_codes,
    checked_dtype,
    checked_leaves,
    of_matrices,
)
from jaxmem.optim.preconditioned.shampoo_rule import ShampooRule, ShampooState
from jaxmem.optim.preconditioned.symmetric import PreconditionerDType


def scale_by_shampoo(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-12,
    *,
    block_size: int = 1024,
    one_sided: bool = False,
    precondition_frequency: int = 10,
    start_preconditioning_step: int | None = None,
    grafting: Grafting | None = "adam",
    grafting_b2: ArrayLike = 0.999,
    grafting_eps: ArrayLike = 1e-8,
    stacked: Any = None,
    weight_dimension_numbers: Any = None,
    bits: int | LowBit = 32,
    preconditioner_dtype: PreconditionerDType = "float32",
) -> optax.GradientTransformation:
    """Rescales updates by Shampoo, in blocks, with the length of another rule's step.

    A matrix is cut into blocks of `block_size` rows and columns, those at its ends are
    smaller. Of a block [m, n] with gradient g at step t = 1, 2, ...::

      mu <- b1 mu + (1 - b1) g,  M = mu / (1 - b1^t)
      L <- b2 L + (1 - b2) g g^T,  R <- b2 R + (1 - b2) g^T g
      P = (L / (1 - b2^t) + eps)^(-1/4) M (R / (1 - b2^t) + eps)^(-1/4)
      G = M / (sqrt(nu / (1 - grafting_b2^t)) + grafting_eps)
      update = |G| / |P| P

    in float32, with roots that are computed by eigendecompositions every
    `precondition_frequency` steps, and nu the second moment of g. With `b2` of 1 L and
    R are sums, which are not divided. Before the first roots there are, and for leaves
    of no matrices, the update is G. With `one_sided` P has the smaller side alone, by
    the inverse square root: (L / (1 - b2^t) + eps)^(-1/2) M where m <= n.

    The matrices of a stack [layers, m, n] and the blocks of a matrix are done one after
    another: products and decompositions of one block are there at a time, and
    `jaxmem.schedule` moves each layer's into the backward scan.

    **State**, bytes a parameter of a matrix: of both moments 8 in float32, 2.13 with
    `bits=8`, 1.06 with `bits=4`; of L, R and their roots in blocks of one size on both
    sides 16 in float32, 8 with `preconditioner_dtype` "bfloat16", 2.1 with "int8",
    which keeps one half of each; with `one_sided` half of that.

    **Error.** In float32 that of roundings alone: eigenvalues are exact to 1e-7 of the
    largest, so roots of matrices with a wider spread than that depend on `eps`. With
    `bits` moments are rounded after each step, as those of `scale_by_adam`. With "int8"
    the diagonals of L, R and of their roots stay in float32. The rest of L and R is
    rounded stochastically after each step, to one of the two codes beside it, which are
    (highest - lowest) / 255 of a row (or of 256 of its elements) apart: its mean is
    exact, and what rounding adds has at most 1 / (2 sqrt(1 - b2^2)) of that distance
    as its standard deviation, 11 of them for a `b2` of 0.999, 2 for 0.95. Eigenvalues
    that rounding hides, those smaller than the most negative one is large, count as
    that. Elements of a root are rounded to the nearest code. "bfloat16" rounds
    likewise, by 2^-8.

    Products are of the precision of `jax.default_matmul_precision`: GPUs and TPUs round
    their operands unless it says otherwise. Roots are always exact.

    Args:
      b1: decay of the first moment, in [0, 1).
      b2: decay of L and R, in (0, 1]; 1 in the implementation of the source.
      eps: added to eigenvalues.
      block_size: the most rows and columns of a block.
      one_sided: a block has a matrix for its smaller side alone, for the rows if both
        are of one size.
      precondition_frequency: steps between two computations of the roots; 1 in the
        implementation of the source.
      start_preconditioning_step: the first step with roots, from 1 on; by default
        `precondition_frequency`.
      grafting: whose step's length the update of a block has: that of "adam", "rmsprop"
        (Adam's without the correction of nu) or "sgd" (M); with None it is P.
      grafting_b2: decay of nu, in [0, 1).
      grafting_eps: added to the root of nu.
      stacked: which leaves have layers along axis 0, as `came` takes them: of these
        [layers, m, n] are matrices, of others [m, n]. By default leaves of two axes
        are matrices.
      weight_dimension_numbers: in place of `stacked`, `optax.contrib.
        MuonDimensionNumbers` or a tree of these, as `muon` takes them.
      bits: of both moments: 8, 4, 32 (float32), or a `LowBit`, whose seed is that of
        all stochastic rounding.
      preconditioner_dtype: how L, R and their roots are stored.

    Returns:
      An `optax.GradientTransformation` with a `ShampooState`. Updates have the
      gradients' dtypes.

    Raises:
      ValueError, TypeError: an argument out of its range, or two that exclude each
        other; from `init`, a leaf that is no real floating array; from `update` a state
        made with other options or for other parameters.

    Source:
      Gupta et al., "Shampoo: Preconditioned Stochastic Tensor Optimization" (2018),
      arXiv 1802.09568; blocks and grafting as in Anil et al. (2020), arXiv 2002.09018,
      and Shi et al. (2023), arXiv 2309.06497; one side as in Xie et al. (2025), arXiv
      2503.10537, and An et al. (2025), arXiv 2503.20762.
    """
    every = check_int("precondition_frequency", precondition_frequency, 1)
    start = every
    if start_preconditioning_step is not None:
        name = "start_preconditioning_step"
        start = check_int(name, start_preconditioning_step, 1)
    rule = ShampooRule(
        how=checked_codes(bits),
        b1=decay("b1", b1),
        b2=number("b2", b2, above=0, at_most=1),
        eps=number("eps", eps, at_least=0),
        block_size=check_int("block_size", block_size, 1),
        one_sided=check_bool("one_sided", one_sided),
        frequency=every,
        start=start,
        grafting=GraftingRule(
            check_choice("grafting", grafting, (*get_args(Grafting), None)),
            decay("grafting_b2", grafting_b2),
            number("grafting_eps", grafting_eps, at_least=0),
        ),
        dtype=checked_dtype(preconditioner_dtype),
    )
    leaves = checked_leaves("scale_by_shampoo", weight_dimension_numbers, stacked)
    return of_matrices(rule, leaves, ShampooState)


def shampoo(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-12,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    block_size: int = 1024,
    one_sided: bool = False,
    precondition_frequency: int = 10,
    start_preconditioning_step: int | None = None,
    grafting: Grafting | None = "adam",
    grafting_b2: ArrayLike = 0.999,
    grafting_eps: ArrayLike = 1e-8,
    stacked: Any = None,
    weight_dimension_numbers: Any = None,
    bits: int | LowBit = 32,
    preconditioner_dtype: PreconditionerDType = "float32",
) -> optax.GradientTransformationExtraArgs:
    """Shampoo in blocks, grafted, and its state in as few bits as asked.

    `jaxmem.schedule` updates each scanned layer inside the backward pass. Micro-batches
    are accumulated in a sum, as the rule is one of the whole gradient.

    Args:
      learning_rate: a scalar, or a schedule of the number of steps; that of the grafted
        rule.
      weight_decay: decoupled weight decay, multiplied by the learning rate, as in
        `optax.adamw`. With it `update` needs the parameters.
      mask: where to decay the weights: a tree of bools, or a function of the parameters
        that gives one.
      b1, b2, eps: see `scale_by_shampoo`, as for all that follow, which has the rule,
        its error and the bytes.
      block_size, one_sided: see there.
      precondition_frequency, start_preconditioning_step: see there.
      grafting, grafting_b2, grafting_eps: see there.
      stacked, weight_dimension_numbers, bits, preconditioner_dtype: see there.

    Returns:
      An `optax.GradientTransformationExtraArgs`, a chain of `scale_by_shampoo`, the
      weight decay and the learning rate.

    Raises:
      ValueError, TypeError: as `scale_by_shampoo`.

    Source:
      Gupta et al. (2018), arXiv 1802.09568; Shi et al. (2023), arXiv 2309.06497.

    Example::

      tx = jaxmem.optim.shampoo(1e-3, bits=8, preconditioner_dtype="int8")
      state = tx.init(params)
    """
    scaled = scale_by_shampoo(
        b1,
        b2,
        eps,
        block_size=block_size,
        one_sided=one_sided,
        precondition_frequency=precondition_frequency,
        start_preconditioning_step=start_preconditioning_step,
        grafting=grafting,
        grafting_b2=grafting_b2,
        grafting_eps=grafting_eps,
        stacked=stacked,
        weight_dimension_numbers=weight_dimension_numbers,
        bits=bits,
        preconditioner_dtype=preconditioner_dtype,
    )
    tail = decayed_rate(learning_rate, weight_decay, mask)
    return optax.with_extra_args_support(optax.chain(scaled, tail))
