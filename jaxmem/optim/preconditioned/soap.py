"""`soap`: Adam in the eigenbasis of Shampoo's preconditioner."""

from collections.abc import Callable
from typing import Any

import optax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from jaxmem._checks import check_bool, check_int
from jaxmem.optim.factored.arguments import decay, decayed_rate, number
from jaxmem.optim.low_bit.low_bit import LowBit
from jaxmem.optim.preconditioned.leaves import (
    checked_codes,
    checked_dtype,
    checked_leaves,
    of_matrices,
)
from jaxmem.optim.preconditioned.soap_rule import SoapRule, SoapState
from jaxmem.optim.preconditioned.symmetric import PreconditionerDType


def scale_by_soap(
    b1: ArrayLike = 0.95,
    b2: ArrayLike = 0.95,
    shampoo_beta: ArrayLike | None = None,
    eps: ArrayLike = 1e-8,
    *,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10_000,
    one_sided: bool = False,
    factored: bool = False,
    correct_bias: bool = True,
    stacked: Any = None,
    weight_dimension_numbers: Any = None,
    bits: int | LowBit = 32,
    preconditioner_dtype: PreconditionerDType = "float32",
) -> optax.GradientTransformation:
    r"""Rescales updates by SOAP: Adam in the eigenbasis of Shampoo's preconditioner.

    Of a matrix [m, n] with gradient g, bases Ql [m, m] and Qr [n, n], and t the number
    of calls before this one::

      h = Ql^T g Qr
      mu <- b1 mu + (1 - b1) h
      nu <- b2 nu + (1 - b2) h^2
      update = Ql (mu / (sqrt(nu) + eps)) Qr^T sqrt(1 - b2^t) / (1 - b1^t)
      L <- beta L + (1 - beta) g g^T,  R <- beta R + (1 - beta) g^T g

    in float32, and if t is a multiple of `precondition_frequency`, Ql becomes the Q of
    the QR of L Ql, its columns sorted before by the diagonal of Ql^T L Ql, Qr likewise;
    mu is rotated with them, and nu is sorted. The first call has no update and leaves
    the moments at zero: it makes L, R and their eigenvectors Ql, Qr. Leaves of no
    matrices take Adam, and skip the first call, too. With `factored` nu of a matrix is
    the outer product of the means of its rows and columns over the mean of all, as
    Adafactor's.

    The matrices of a stack [layers, m, n] are done one after another: products and
    decompositions of one matrix are there at a time, and `jaxmem.schedule` moves each
    layer's into the backward scan.

    **State**, bytes a parameter of a matrix: of both moments 8 in float32, 2.13 with
    `bits=8`, 1.06 with `bits=4`; of L, Ql, R and Qr 8 (m / n + n / m) in float32, half
    of it with `preconditioner_dtype` "bfloat16", about a fifth with "int8", which keeps
    one half of L and R; with `one_sided` only the smaller of m / n and n / m. With
    `factored` moments take half of that.

    **Error.** In float32 that of roundings alone. With `bits` moments are rounded after
    each step, as those of `scale_by_adam`; here they are in the eigenbasis, with
    neighbours of a like size. With "int8" the diagonals of L and R stay in float32. The
    rest is rounded stochastically after each step, to one of the two codes beside it,
    which are (highest - lowest) / 255 of a row (or of 256 of its elements) apart: its
    mean is exact, and what rounding adds has at most 1 / (2 sqrt(1 - beta^2)) of
    that distance as its standard deviation. A basis is rounded to the nearest code
    once a refresh, its columns by less than 1% of their length. "bfloat16" rounds
    likewise, by 2^-8.

    Products are of the precision of `jax.default_matmul_precision`: GPUs and TPUs round
    their operands unless it says otherwise. Refreshes are always exact.

    Args:
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      shampoo_beta: decay of L and R, in [0, 1); None is `b2`.
      eps: added to the denominator.
      precondition_frequency: steps between two refreshes of the bases.
      max_precond_dim: a larger side has no basis of its own, so that vocabularies have
        none.
      one_sided: only the smaller side has a basis, the rows if both are of one size.
      factored: keep the means of rows and columns of nu instead of nu.
      correct_bias: divide by what the moments' start at zero leaves out.
      stacked: which leaves have layers along axis 0, as `came` takes them: of these
        [layers, m, n] are matrices, of others [m, n]. By default leaves of two axes
        are matrices.
      weight_dimension_numbers: in place of `stacked`, `optax.contrib.
        MuonDimensionNumbers` or a tree of these, as `muon` takes them.
      bits: of both moments: 8, 4, 32 (float32), or a `LowBit`, whose seed is that of
        all stochastic rounding.
      preconditioner_dtype: how L, R and the bases are stored.

    Returns:
      An `optax.GradientTransformation` with a `SoapState`. Updates have the gradients'
      dtypes.

    Raises:
      ValueError, TypeError: an argument out of its range, or two that exclude each
        other; from `init`, a leaf that is no real floating array; from `update` a state
        made with other options or for other parameters.

    Source:
      Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (2024), arXiv
      2409.11321, algorithm 3, with what its authors' implementation does in the first
      step; `one_sided` and `factored` are its variants that take less memory.
    """
    b2 = decay("b2", b2)
    rule = SoapRule(
        how=checked_codes(bits),
        b1=decay("b1", b1),
        b2=b2,
        gram_decay=b2 if shampoo_beta is None else decay("shampoo_beta", shampoo_beta),
        eps=number("eps", eps, at_least=0),
        frequency=check_int("precondition_frequency", precondition_frequency, 1),
        largest=check_int("max_precond_dim", max_precond_dim, 1),
        one_sided=check_bool("one_sided", one_sided),
        factored=check_bool("factored", factored),
        correct_bias=check_bool("correct_bias", correct_bias),
        dtype=checked_dtype(preconditioner_dtype),
    )
    leaves = checked_leaves("scale_by_soap", weight_dimension_numbers, stacked)
    return of_matrices(rule, leaves, SoapState)


def soap(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.95,
    b2: ArrayLike = 0.95,
    shampoo_beta: ArrayLike | None = None,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.01,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10_000,
    one_sided: bool = False,
    factored: bool = False,
    correct_bias: bool = True,
    stacked: Any = None,
    weight_dimension_numbers: Any = None,
    bits: int | LowBit = 32,
    preconditioner_dtype: PreconditionerDType = "float32",
) -> optax.GradientTransformationExtraArgs:
    """SOAP, with the defaults of its authors, and its state in as few bits as asked.

    `jaxmem.schedule` updates each scanned layer inside the backward pass. Micro-batches
    are accumulated in a sum, as the rule is one of the whole gradient.

    Args:
      learning_rate: a scalar, or a schedule of the number of steps; 3e-3 in its
        authors' implementation.
      weight_decay: decoupled weight decay, multiplied by the learning rate, as in
        `optax.adamw`: of the weights before the step, in the first step too. With it
        `update` needs the parameters.
      mask: where to decay the weights: a tree of bools, or a function of the parameters
        that gives one.
      b1, b2, shampoo_beta, eps: see `scale_by_soap`, as for all that follow, which has
        the rule, its error and the bytes.
      precondition_frequency, max_precond_dim, one_sided, factored: see there.
      correct_bias: see there.
      stacked, weight_dimension_numbers, bits, preconditioner_dtype: see there.

    Returns:
      An `optax.GradientTransformationExtraArgs`, a chain of `scale_by_soap`, the weight
      decay and the learning rate.

    Raises:
      ValueError, TypeError: as `scale_by_soap`.

    Source:
      Vyas et al. (2024), arXiv 2409.11321.

    Example::

      tx = jaxmem.optim.soap(3e-3, bits=8, preconditioner_dtype="int8")
      state = tx.init(params)
    """
    scaled = scale_by_soap(
        b1,
        b2,
        shampoo_beta,
        eps,
        precondition_frequency=precondition_frequency,
        max_precond_dim=max_precond_dim,
        one_sided=one_sided,
        factored=factored,
        correct_bias=correct_bias,
        stacked=stacked,
        weight_dimension_numbers=weight_dimension_numbers,
        bits=bits,
        preconditioner_dtype=preconditioner_dtype,
    )
    tail = decayed_rate(learning_rate, weight_decay, mask)
    return optax.with_extra_args_support(optax.chain(scaled, tail))
