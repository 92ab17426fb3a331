"""LOMO and AdaLomo: optimizers of next to no state, for gradients that never wait."""

from collections.abc import Callable
from typing import Any

import optax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from jaxmem._checks import check_bool
from jaxmem._paths import check_selection
from jaxmem.optim._adama_arguments import check_rate
from jaxmem.optim.factored.arguments import decayed, decayed_rate, number, pair
from jaxmem.optim.factored.factored_rms import scale_by_factored_rms
from jaxmem.optim.factored.leaves import widened
from jaxmem.optim.factored.rms import clip_by_layer_rms, scale_by_layer_rms

ADALOMO = "AdaLomo"


def lomo(
    learning_rate: optax.ScalarOrSchedule,
    clip_value: ArrayLike | None = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """LOMO: SGD whose gradients are used up inside the backward pass.

    ::

      g = clip(g, -clip_value, clip_value)
      p <- (1 - learning_rate weight_decay) p - learning_rate g

    in float32, the update cast once. State: none (4 bytes with a schedule). The other
    half of LOMO is `jaxmem.schedule`, which updates each scanned layer as soon as its
    gradient is there, so that a step holds the parameters and one layer's gradient.
    Under `jaxmem.microbatch` gradients are accumulated in a sum, which is one array of
    the parameters' size: a step on the whole batch takes none.

    **Clipping by the global norm** needs a number made of all gradients before the
    first update. `schedule` then runs the backward pass twice, as LOMO does, and the
    result is that of the plain step::

      tx = optax.chain(optax.clip_by_global_norm(1.0), jaxmem.optim.lomo(1e-3))
      step = jaxmem.schedule(step, clip="two_pass", donate_argnums=0)

    With a value besides, `optax.clip(value)` stands first in that chain, as in the
    reference. A gradient that is not finite makes its parameters not finite; there is
    no other memory of it.

    Args:
      learning_rate: a scalar, or a schedule of the number of steps.
      clip_value: the most that an element of the gradient counts, more than 0.
      weight_decay: multiplied by the learning rate; with it `update` needs the
        parameters.
      mask: where to decay the weights: a tree of bools, or a function of the parameters
        that gives one.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: an argument out of range; from `update`, no parameters with decay.
      TypeError: an argument of another kind.

    Source:
      Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited
      Resources" (2023), arXiv 2306.09782.

    Example::

      tx = jaxmem.optim.lomo(1e-3, clip_value=1.0)
      step = jaxmem.schedule(step, donate_argnums=0)  # an ordinary step with tx
    """
    tail = decayed_rate(learning_rate, weight_decay, mask)
    if clip_value is None:
        return widened(tail)
    limit = number("clip_value", clip_value, above=0)
    return widened(optax.chain(optax.clip(limit), tail))


def adalomo(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    eps: tuple[ArrayLike, ArrayLike] = (1e-30, 1e-3),
    clip_threshold: ArrayLike = 1.0,
    decay_rate: ArrayLike = -0.8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    stacked: Any = None,
    per_layer: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """AdaLomo: adaptive steps with the memory of SGD.

    At step t = 1, 2, ..., `b = 1 - t ** decay_rate`, R and C being the means of a
    matrix over its columns and rows::

      R, C <- b (R, C) + (1 - b) means(g^2 + eps[0])
      u = g rsqrt(R / mean(R)) rsqrt(C)^T,  u = u / max(1, RMS(u) / clip_threshold)
      l = learning_rate max(eps[1], RMS(p))
      p <- (1 - l weight_decay) p - l u

    and `v <- b v + (1 - b) (g^2 + eps[0])`, `u = g rsqrt(v)` for vectors. State:
    `4 (m + n)` bytes for a matrix [m, n], 4 bytes a parameter for vectors. All is
    computed in float32 and the update cast once.

    `jaxmem.schedule` updates each scanned layer inside the backward pass: a step holds
    the parameters, one layer's gradient and little else. Under
    `jaxmem.microbatch` gradients are accumulated in a sum, one array of the parameters'
    size, since R and C are means of the square of the whole gradient. The paper
    recommends it without clipping by a norm.

    A gradient that is not finite stays in R and C: leave such steps out, as
    `jaxmem.microbatch(..., skip_nonfinite=True)` or `optax.apply_if_finite` do.

    Args:
      learning_rate: a scalar, or a schedule of the number of steps.
      eps: added to g^2, and the least RMS of a parameter.
      clip_threshold: the most RMS of an update, more than 0.
      decay_rate: exponent of the decay, less than 0.
      weight_decay: multiplied by l.
      mask: where to decay the weights: a tree of bools, or a function of the parameters
        that gives one.
      stacked: which leaves have layers along axis 0, see `scale_by_came`.
      per_layer: RMS(u) and RMS(p) are a layer's; False: the whole leaf's.

    Returns:
      An `optax.GradientTransformationExtraArgs`; `update` needs the parameters.

    Raises:
      ValueError: an argument out of range; from `update`, no parameters, or a state of
        other parameters.
      TypeError: an argument of another kind, parameters that are no real floats.

    Source:
      Lv et al., "AdaLomo: Low-memory Optimization with Adaptive Learning Rate" (2023),
      arXiv 2310.10195.

    Example::

      tx = jaxmem.optim.adalomo(1e-3, stacked="layers")
      step = jaxmem.schedule(step, donate_argnums=0)  # an ordinary step with tx
    """
    small, least = pair("eps", eps)
    exponent = -number("decay_rate", decay_rate, below=0)
    threshold = number("clip_threshold", clip_threshold, above=0)
    rate = check_rate("learning_rate", learning_rate)
    check_selection("stacked", stacked)
    rms_stacked = stacked if check_bool("per_layer", per_layer) else False
    return widened(
        optax.chain(
            scale_by_factored_rms(True, exponent, 0, 0, small, stacked=stacked),
            clip_by_layer_rms(ADALOMO, threshold, rms_stacked),
            decayed(weight_decay, mask),
            scale_by_layer_rms(ADALOMO, least, rms_stacked),
            optax.scale_by_learning_rate(rate),
        )
    )
