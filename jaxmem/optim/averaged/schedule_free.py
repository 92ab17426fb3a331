"""`schedule_free`: any rule with the average of its weights, as optax has it.

Of the three sequences, z (the rule's), x (their average) and y (the parameters), optax
keeps y and z. z is of the size of the weights, and a code of 8 bits would round it to
1/127 of the largest of them. Here z - x is kept in its place: it is of the size of the
last steps, and so is what rounding adds to it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float32, Int32, PyTree

from jaxmem._checks import check_scalar
from jaxmem.optim._adama_arguments import check_rate
from jaxmem.optim._by_keys import held_by_keys
from jaxmem.optim._state_class import check_class
from jaxmem.optim.accumulation.steps import as_transformation
from jaxmem.optim.factored.arguments import number
from jaxmem.optim.low_bit.low_bit import Bits, as_low_bit, zeros
from jaxmem.optim.low_bit.moments import check_moments, map_moments, moved


class ScheduleFreeState(NamedTuple):
    """State of `schedule_free`.

    Attributes:
      b1: float32[], how much of y is the average.
      weight_sum: float32[], of the weights of the average.
      step_count: int32[], the number of the next step, from 1 on.
      max_lr: float32[], the largest learning rate so far.
      base_optimizer_state: that of the rule.
      ahead: z - x: `MomentCodes` a leaf, or float32.
    """

    b1: Float32[Array, ""]
    weight_sum: Float32[Array, ""]
    step_count: Int32[Array, ""]
    max_lr: Float32[Array, ""]
    base_optimizer_state: Any
    ahead: PyTree


def schedule_free(
    base_optimizer: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    weight_lr_power: ArrayLike = 2.0,
    *,
    bits: Bits = 32,
) -> optax.GradientTransformationExtraArgs:
    """`optax.contrib.schedule_free`, with its state in float32, 8 or 4 bits.

    With u the update of `base_optimizer` at the parameters y and c the share of this
    step in the average, max_lr ** weight_lr_power over the sum of these so far::

      z <- z + u
      x <- (1 - c) x + c z
      y <- b1 x + (1 - b1) z

    Gradients are those at y, which are the parameters; the model to evaluate is x, of
    `schedule_free_eval_params`. Of d = z - x, which is what is kept, the rule is::

      s = d + u
      y <- y + c s + (1 - b1) ((1 - c) s - d)
      d <- (1 - c) s

    in float32, elementwise. To rounding, results are optax's.

    **State**, bytes a parameter beside that of `base_optimizer`: 4 with float32, 1.06
    with 8 bits, 0.53 with 4. With codes XLA for GPU keeps u of a leaf, in float32,
    while d is rounded; `jaxmem.schedule` leaves that of a layer.

    **Error.** After many steps u is less than half a code of d, so codes are rounded
    stochastically unless `LowBit` says otherwise. A rounding of d by e leaves y as it
    is and moves x by (1 - b1) e and z by b1 e. With 8 bits, e is at most 1/127 of the
    largest of its group, 1/64 of it where it is rounded stochastically.

    A gradient that is not finite makes its block's d NaN, and it stays so: leave such
    steps out, as `optax.apply_if_finite` does.

    Args:
      base_optimizer: any transformation whose updates are to be added, with its
        learning rate and without momentum.
      learning_rate: of `base_optimizer`, for the weights of the average: a scalar or a
        schedule, which is asked for step 1, 2, ..., as in optax.
      b1: how much of the parameters is the average, in [0, 1].
      weight_lr_power: the power of the largest rate so far that weighs a step.
      bits: 8, 4, 32 (float32), or a `LowBit`: of d.

    Returns:
      An `optax.GradientTransformationExtraArgs` with a `ScheduleFreeState`. Its
      `update` needs the parameters.

    Raises:
      TypeError, ValueError: an argument out of its range; from `init` a leaf that is no
        real floating array, or whose shard the block does not divide; from `update`
        missing parameters, or a state made with other options or for other parameters.

    Source:
      Defazio et al., "The Road Less Scheduled" (2024), arXiv 2405.15682; the form that
      keeps z - x is worked out from the rule.

    Example::

      rule = jaxmem.optim.lion(1e-4)
      tx = jaxmem.optim.schedule_free(rule, 1e-4, bits=8)
    """
    base = as_transformation("base_optimizer", base_optimizer)
    rate = check_rate("learning_rate", learning_rate)
    b1 = check_scalar("b1", b1, at_least=0, at_most=1)
    power = number("weight_lr_power", weight_lr_power, at_least=0)
    how = as_low_bit(bits, stochastic=True)

    def init(params: PyTree) -> Any:
        return ScheduleFreeState(
            b1=jnp.array(b1, jnp.float32),
            weight_sum=jnp.zeros((), jnp.float32),
            step_count=jnp.ones((), jnp.int32),
            max_lr=jnp.zeros((), jnp.float32),
            base_optimizer_state=base.init(params),
            ahead=zeros(how, params, (0,))[0],
        )

    def update(updates: PyTree, state: Any, params: Any = None, **extra: Any) -> Any:
        check_class("schedule_free", state, ScheduleFreeState)
        if params is None:
            raise ValueError(
                "params=None: schedule_free needs the parameters: "
                "update(grads, state, params)"
            )
        check_moments(how, updates, state.ahead, names=("ahead",), which=(0,))
        u, inner = base.update(updates, state.base_optimizer_state, params, **extra)
        max_lr, total, c = _share(rate, power, state)

        def rule(u, d):
            s = d + u.astype(jnp.float32)
            new = (1 - c) * s
            step = c * s + jnp.float32(1 - b1) * (new - d)
            return step.astype(u.dtype), new

        def leaf(path, u, d):
            return moved(how, rule, path, (state.step_count,), u, d, which=(0,))

        with jax.named_scope("jaxmem.schedule_free"):
            u, ahead = map_moments(leaf, u, state.ahead)
        count: Any = optax.safe_increment(state.step_count)
        return u, ScheduleFreeState(state.b1, total, count, max_lr, inner, ahead)

    return held_by_keys(optax.GradientTransformationExtraArgs(init, update))


def _share(rate: Any, power: Any, state: ScheduleFreeState) -> tuple[Any, Any, Any]:
    """The largest rate, the sum of weights, and this step's share, 0 at a rate of 0."""
    rate = rate(state.step_count) if callable(rate) else rate
    max_lr = jnp.maximum(state.max_lr, jnp.asarray(rate, jnp.float32))
    weight = max_lr**power
    total = state.weight_sum + weight
    return max_lr, total, jnp.where(total == 0, 0.0, weight / total)
