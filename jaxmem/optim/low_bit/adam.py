"""Adam whose moments are stored in 8 or 4 bits, as optax transformations."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int32, PyTree

from jaxmem._checks import check_bool, shown
from jaxmem.optim._adama_arguments import check_decays, check_mask, check_rate
from jaxmem.optim._by_keys import held_by_keys
from jaxmem.optim.low_bit.low_bit import EIGHT, Bits, as_low_bit, zeros
from jaxmem.optim.low_bit.moments import check_moments, map_moments, moved


class LowBitAdamState(NamedTuple):
    """State of `scale_by_adam`.

    Attributes:
      count: int32[], steps.
      mu: first moment: `MomentCodes` a leaf, or float32.
      nu: second moment, likewise.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: PyTree
    nu: PyTree


def scale_by_adam(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    *,
    bits: Bits = EIGHT,
    on_host: bool = False,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """Rescales updates by Adam, with moments stored in 8 or 4 bits.

    The rule is that of `optax.scale_by_adam`::

      m <- b1 m + (1 - b1) g
      v <- b2 v + (1 - b2) g^2
      update = m / (1 - b1^t) / (sqrt(v / (1 - b2^t) + eps_root) + eps)

    in float32, with m and v out of their codes; the update is made of the new moments
    before they are rounded into codes again. That is one elementwise pass a leaf: the
    moments are never there as a whole.

    **State**, bytes a parameter: 2.13 with 8 bits (8 with float32), 2.03 with
    `LowBit(8, code="dynamic")`, 1.06 with 4. Leaves of fewer than 4,096 elements, and
    those whose last axis the block does not divide, keep moments in float32.

    **Error.** Rounded to 8 bits (companding), m is off by at most 1/127 of the largest
    of its group of 32, and the root of v by 1/510 of it. A group's smaller values
    are rounded more in proportion, and their steps become shorter rather than longer:
    the root of v is never below 1/128 of the group's largest. With
    bitsandbytes' map v may become 0, and the step of such an element be longer than
    Adam's: far longer, where magnitudes in a block differ by more than 1e4.
    `LowBit` has the formats.

    A gradient that is not finite makes its block's moments NaN, and they stay so:
    leave such steps out, with `jaxmem.microbatch(skip_nonfinite=...)` or
    `optax.apply_if_finite`.

    Args:
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the denominator outside the square root.
      eps_root: added inside the square root.
      bits: 8, 4, 32 (moments in float32), a `LowBit`, or what `choose_codes` returns.
      on_host: keep the moments in the host's memory, as `LowBit(on_host=True)`.
      nesterov: Nesterov momentum, as in `optax.scale_by_adam`: in place of m / (1 -
        b1^t) there is b1 m / (1 - b1^(t + 1)) + (1 - b1) g / (1 - b1^t).

    Returns:
      An `optax.GradientTransformation` with a `LowBitAdamState`. Updates have the
      gradients' dtypes; codes and scales of `init` lie where the parameters do.

    Raises:
      ValueError, TypeError: an argument out of its range; from `init` a leaf that is no
        real floating array, or whose shard the block does not divide; from `update` a
        state made with other options or for other parameters.

    Source:
      Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861;
      FlashOptim, arXiv 2602.23349, whose codes are changed as `companding` says.
    """
    b1, b2, eps, eps_root = check_decays(b1, b2, eps, eps_root)
    how = as_low_bit(bits)
    if check_bool("on_host", on_host):
        how = replace(how, on_host=True)
    nesterov = check_bool("nesterov", nesterov)

    def init(params: PyTree) -> Any:
        return LowBitAdamState(jnp.zeros((), jnp.int32), *zeros(how, params))

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> Any:
        del params
        if not isinstance(state, LowBitAdamState):
            raise TypeError(
                f"state={shown(state)}: the state of init, a LowBitAdamState"
            )
        check_moments(how, updates, state.mu, state.nu)
        count: Any = optax.safe_increment(state.count)
        t = count.astype(jnp.float32)
        correct = [1 - jnp.asarray(b, jnp.float32) ** t for b in (b1, b2)]
        ahead = 1 - jnp.asarray(b1, jnp.float32) ** (t + 1)

        def rule(g, m, v):
            wide = g.astype(jnp.float32)
            m = _f32(b1) * m + _f32(1 - b1) * wide
            v = _f32(b2) * v + _f32(1 - b2) * jnp.square(wide)
            root = jnp.sqrt(v / correct[1] + _f32(eps_root))
            first = m / correct[0]
            if nesterov:
                first = _f32(b1) * (m / ahead) + _f32(1 - b1) * (wide / correct[0])
            return (first / (root + _f32(eps))).astype(g.dtype), m, v

        def leaf(path, g, m, v):
            return moved(how, rule, path, (count,), jnp.asarray(g), m, v)

        with jax.named_scope("jaxmem.adam"):
            u, mu, nu = map_moments(leaf, updates, state.mu, state.nu)
        return u, LowBitAdamState(count, mu, nu)

    return held_by_keys(optax.GradientTransformation(init, update))


def adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    *,
    bits: Bits = EIGHT,
    on_host: bool = False,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """`optax.adam` with moments stored in 8 or 4 bits.

    Args:
      learning_rate: a scalar, or a schedule of the number of steps.
      b1, b2, eps, eps_root, bits, on_host, nesterov: see `scale_by_adam`, which has the
        rule, its error and the bytes.

    Returns:
      An `optax.GradientTransformation`, a chain of `scale_by_adam` and the learning
      rate.

    Raises:
      ValueError, TypeError: as `scale_by_adam`.

    Example::

      tx = jaxmem.optim.adam(1e-3, bits=8)
      state = tx.init(params)  # 2.1 bytes a parameter instead of 8
    """
    return optax.chain(
        scale_by_adam(
            b1, b2, eps, eps_root, bits=bits, on_host=on_host, nesterov=nesterov
        ),
        optax.scale_by_learning_rate(check_rate("learning_rate", learning_rate)),
    )


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    bits: Bits = EIGHT,
    on_host: bool = False,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`optax.adamw` with moments stored in 8 or 4 bits.

    Args:
      learning_rate: a scalar, or a schedule of the number of steps.
      b1, b2, eps, eps_root, bits, on_host, nesterov: see `scale_by_adam`, which has the
        rule, its error and the bytes.
      weight_decay: decoupled weight decay, multiplied by the learning rate.
      mask: where to decay the weights: a tree of bools, or a function of the parameters
        that gives one.

    Returns:
      An `optax.GradientTransformationExtraArgs`, a chain of `scale_by_adam`, the weight
      decay and the learning rate. Its `update` needs the parameters.

    Raises:
      ValueError, TypeError: as `scale_by_adam`.

    Example::

      tx = jaxmem.optim.adamw(3e-4, weight_decay=0.1, bits=4)
    """
    check_mask(mask)
    decay = check_rate("weight_decay", weight_decay)
    return optax.chain(
        scale_by_adam(
            b1, b2, eps, eps_root, bits=bits, on_host=on_host, nesterov=nesterov
        ),
        optax.add_decayed_weights(decay, mask),
        optax.scale_by_learning_rate(check_rate("learning_rate", learning_rate)),
    )


def _f32(number: Any) -> Any:
    """A Python number as it is, a scalar array in float32."""
    return number if isinstance(number, int | float) else number.astype(jnp.float32)
