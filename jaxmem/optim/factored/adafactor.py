"""Adafactor, right on stacked layers."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from jaxmem._checks import check_bool, check_dtype
from jaxmem.optim._adama_arguments import check_rate
from jaxmem.optim.factored.arguments import decay, decayed, number
from jaxmem.optim.factored.factored_rms import scale_by_factored_rms
from jaxmem.optim.factored.leaves import widened
from jaxmem.optim.factored.rms import clip_by_layer_rms, scale_by_layer_rms

WHO = "Adafactor"
LEAST_RMS = 1e-3  # of a parameter: the paper's second epsilon


def adafactor(
    learning_rate: optax.ScalarOrSchedule | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: ArrayLike = 0.8,
    decay_offset: ArrayLike = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: ArrayLike | None = 1.0,
    momentum: ArrayLike | None = None,
    dtype_momentum: DTypeLike = jnp.float32,
    weight_decay_rate: optax.ScalarOrSchedule | None = None,
    eps: ArrayLike = 1e-30,
    factored: bool = True,
    weight_decay_mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    stacked: Any = None,
    per_layer: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Adafactor with optax's arguments and defaults, on each layer of a stacked leaf.

    A leaf [L, m, n] gets what `optax.adafactor` gives each [m, n]: factors, update
    clipping and parameter scale are a layer's, where optax takes them over the stack
    and factors the two largest of the three axes. So `jaxmem.schedule` can update each
    layer inside the backward pass. On leaves without layers the updates are optax's. In
    the order of the chain::

      u = g / sqrt(factored moment)              `scale_by_factored_rms` has the rule
      u = u / max(1, RMS(u) / clipping_threshold)
      u = learning_rate u max(RMS(p), 1e-3)
      u <- momentum u_before + (1 - momentum) u
      p <- p - (u + weight_decay_rate p)

    State: `4 (m + n)` bytes for a matrix [m, n] whose sizes reach
    `min_dim_size_to_factor`, 4 bytes a parameter for other leaves; with momentum as
    many as `dtype_momentum` has a parameter in addition. It is float32 for bfloat16
    parameters, and all is computed in float32 and cast once. Micro-batches are
    accumulated in a sum: the moment is that of the whole gradient.

    Args:
      learning_rate: a scalar, a schedule of the number of steps, or None for 1.
      min_dim_size_to_factor: both sizes of a matrix must reach it.
      decay_rate: exponent of the decay, see `scale_by_factored_rms`.
      decay_offset: steps that were finished before the decay counts; optax's is NaN
        until they are.
      multiply_by_parameter_scale: False: learning rates are absolute.
      clipping_threshold: the most RMS of an update, more than 0; None: no clipping.
      momentum: decay in [0, 1), or None for none.
      dtype_momentum: of the momentum.
      weight_decay_rate: not multiplied by the learning rate, as in optax.
      eps: added to g^2.
      factored: False: no moment is factored.
      weight_decay_mask: where to decay the weights.
      stacked: which leaves have layers along axis 0, see `scale_by_came`; `False`: no
        leaf has.
      per_layer: False: both RMS are those of the whole leaf, as in optax.

    Returns:
      An `optax.GradientTransformationExtraArgs`. With the parameter scale or weight
      decay `update` needs the parameters.

    Raises:
      ValueError: an argument out of range; from `update`, no parameters where they are
        needed, or a state of other parameters.
      TypeError: an argument of another kind, parameters that are no real floats.

    Source:
      Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory
      Cost" (2018), arXiv 1804.04235.

    Example::

      tx = jaxmem.optim.adafactor(1e-3, stacked="layers")
    """
    rms_stacked = stacked if check_bool("per_layer", per_layer) else False
    parts = [
        scale_by_factored_rms(
            factored,
            decay_rate,
            number("decay_offset", decay_offset),
            min_dim_size_to_factor,
            number("eps", eps, at_least=0),
            stacked=stacked,
        )
    ]
    if clipping_threshold is not None:
        threshold = number("clipping_threshold", clipping_threshold, above=0)
        parts.append(clip_by_layer_rms(WHO, threshold, rms_stacked))
    if learning_rate is not None:
        rate = check_rate("learning_rate", learning_rate)
        parts.append(optax.scale_by_learning_rate(rate, flip_sign=False))
    if check_bool("multiply_by_parameter_scale", multiply_by_parameter_scale):
        parts.append(scale_by_layer_rms(WHO, LEAST_RMS, rms_stacked))
    if momentum is not None:
        dtype = check_dtype("dtype_momentum", dtype_momentum)
        parts.append(optax.ema(decay("momentum", momentum), False, dtype))
    if weight_decay_rate is not None:
        names = "weight_decay_rate", "weight_decay_mask"
        parts.append(decayed(weight_decay_rate, weight_decay_mask, names))
    return widened(optax.chain(*parts, optax.scale(-1)))
