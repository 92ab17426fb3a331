"""Lion: the sign of a momentum, which is stored in 8 or 4 bits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int32, PyTree

from jaxmem.optim.factored.arguments import decay, decayed_rate
from jaxmem.optim.low_bit.low_bit import Bits, as_low_bit
from jaxmem.optim.low_bit.one_moment import one_moment


class LionState(NamedTuple):
    """State of `scale_by_lion`.

    Attributes:
      count: int32[], steps.
      mu: momentum: `MomentCodes` a leaf, or float32.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: PyTree


def scale_by_lion(
    b1: ArrayLike = 0.9, b2: ArrayLike = 0.99, *, bits: Bits = 32
) -> optax.GradientTransformation:
    """Rescales updates by Lion, with its momentum in float32, 8 or 4 bits.

    The rule is that of `optax.scale_by_lion`, in float32::

      update = sign(b1 m + (1 - b1) g)
      m <- b2 m + (1 - b2) g

    in one elementwise pass a leaf; the update is made of the momentum before it is
    rounded into codes.

    **State**, bytes a parameter: 4 with float32, 1.06 with 8 bits, 0.53 with 4.

    **Error.** Where the rounding of m turns the sign of `b1 m + (1 - b1) g`, the
    element steps the other way; other updates are exact. Of independent gradients whose
    standard deviation is ten times their mean that is 1 in 160 elements with 8 bits,
    and 1 in 7 with 4. A step is a hundredth of the gradient, less than half a code of
    large elements, so codes are rounded stochastically unless `LowBit` says otherwise:
    to the nearest, a momentum that should be 1 ends at 1.1 with 8 bits.

    A gradient that is not finite makes its block's momentum NaN, and it stays so: leave
    such steps out, with `jaxmem.microbatch(skip_nonfinite=...)` or
    `optax.apply_if_finite`.

    Args:
      b1: how much of the update is the momentum, in [0, 1).
      b2: decay of the momentum, in [0, 1).
      bits: 8, 4, 32 (momentum in float32), or a `LowBit`.

    Returns:
      An `optax.GradientTransformation` with a `LionState`. Updates are -1, 0 or 1, in
      the gradients' dtypes; codes and scales of `init` lie where the parameters do.

    Raises:
      ValueError, TypeError: an argument out of its range; from `init` a leaf that is no
        real floating array, or whose shard the block does not divide; from `update` a
        state made with other options or for other parameters.

    Source:
      Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), arXiv
      2302.06675; the codes are those of `scale_by_adam`.
    """
    b1, b2 = decay("b1", b1), decay("b2", b2)
    how = as_low_bit(bits, stochastic=True)

    def rule(t: Any, g: Any, m: Any) -> Any:
        del t
        return jnp.sign(b1 * m + (1 - b1) * g), b2 * m + (1 - b2) * g

    return one_moment("scale_by_lion", how, LionState, rule)


def lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    weight_decay: optax.ScalarOrSchedule = 1e-3,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    bits: Bits = 32,
) -> optax.GradientTransformationExtraArgs:
    """`optax.lion` with its momentum in float32, 8 or 4 bits.

    `jaxmem.schedule` updates each scanned layer inside the backward pass. Micro-batches
    are accumulated in a sum, as the sign is that of the whole gradient.

    Args:
      learning_rate: a scalar, or a schedule of the number of steps; 3 to 10 times
        smaller than AdamW's.
      b1, b2, bits: see `scale_by_lion`, which has the rule, its error and the bytes.
      weight_decay: decoupled weight decay, multiplied by the learning rate; with it
        `update` needs the parameters.
      mask: where to decay the weights: a tree of bools, or a function of the parameters
        that gives one.

    Returns:
      An `optax.GradientTransformationExtraArgs`, a chain of `scale_by_lion`, the weight
      decay and the learning rate.

    Raises:
      ValueError, TypeError: as `scale_by_lion`.

    Source:
      Chen et al. (2023), arXiv 2302.06675.

    Example::

      tx = jaxmem.optim.lion(1e-4, weight_decay=0.1, bits=8)
      state = tx.init(params)  # 1.06 bytes a parameter
    """
    tail = decayed_rate(learning_rate, weight_decay, mask)
    return optax.with_extra_args_support(
        optax.chain(scale_by_lion(b1, b2, bits=bits), tail)
    )
