"""`schedule_free_adamw`: a second moment and an average, each in as few bits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int32, PyTree

from jaxmem._checks import check_int, shown
from jaxmem.optim._adama_arguments import check_rate
from jaxmem.optim.averaged.schedule_free import schedule_free
from jaxmem.optim.factored.arguments import decay, decayed_rate, number
from jaxmem.optim.low_bit.low_bit import Bits, as_low_bit
from jaxmem.optim.low_bit.one_moment import one_moment


class RmsState(NamedTuple):
    """State of Adam without its first moment.

    Attributes:
      count: int32[], steps.
      nu: second moment: `MomentCodes` a leaf, or float32.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    nu: PyTree


def schedule_free_adamw(
    learning_rate: optax.ScalarOrSchedule = 0.0025,
    warmup_steps: int | None = None,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_lr_power: ArrayLike = 2.0,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    bits: Bits = 32,
) -> optax.GradientTransformationExtraArgs:
    """`optax.contrib.schedule_free_adamw`, with its state in float32, 8 or 4 bits.

    `schedule_free` of Adam without a first moment::

      v <- b2 v + (1 - b2) g^2
      u = - learning_rate (g / (sqrt(v / (1 - b2^t)) + eps) + weight_decay y)

    The learning rate stays as it is after its warm-up. `schedule_free_eval_params` has
    the model to evaluate.

    **State**, bytes a parameter: 8 with float32, 2.13 with 8 bits, 1.06 with 4, as that
    of `adam`.

    **Error.** That of `schedule_free` and of v in `scale_by_adam`.

    Args:
      learning_rate: a scalar, or a schedule that does not decay.
      warmup_steps: over how many steps the rate rises from 0; not with a schedule.
      b1: how much of the parameters is the average, in [0, 1].
      b2: decay of the second moment, in [0, 1).
      eps: added to the denominator.
      weight_decay: decoupled weight decay, multiplied by the learning rate.
      weight_lr_power: see `schedule_free`.
      mask: where to decay the weights: a tree of bools, or a function of the parameters
        that gives one.
      bits: 8, 4, 32 (float32), or a `LowBit`: of the average and of v.

    Returns:
      An `optax.GradientTransformationExtraArgs` with a `ScheduleFreeState`. Its
      `update` needs the parameters.

    Raises:
      ValueError, TypeError: as `schedule_free`; `warmup_steps` with a schedule.

    Source:
      Defazio et al. (2024), arXiv 2405.15682.

    Example::

      tx = jaxmem.optim.schedule_free_adamw(3e-3, warmup_steps=100, bits=8)
      state = tx.init(params)
      averaged = jaxmem.optim.schedule_free_eval_params(state, params)
    """
    rate = _warmed_up(check_rate("learning_rate", learning_rate), warmup_steps)
    b2, eps = decay("b2", b2), number("eps", eps, at_least=0)

    def rule(t: Any, g: Any, v: Any) -> Any:
        v = b2 * v + (1 - b2) * jnp.square(g)
        unbiased = v / (1 - jnp.asarray(b2, jnp.float32) ** t)
        return g / (jnp.sqrt(unbiased) + eps), v

    how = as_low_bit(bits)
    rms = one_moment("schedule_free_adamw", how, RmsState, rule)
    base = optax.chain(rms, decayed_rate(rate, weight_decay, mask))
    return schedule_free(base, rate, b1, weight_lr_power, bits=how)


def _warmed_up(rate: Any, steps: Any) -> Any:
    if steps is None:
        return rate
    steps = check_int("warmup_steps", steps, 1)
    if callable(rate):
        raise ValueError(
            f"warmup_steps={steps} with learning_rate={shown(rate)}: a schedule has a "
            "warm-up of its own; give a number, or leave warmup_steps out"
        )
    return optax.warmup_constant_schedule(0.0, rate, steps)
