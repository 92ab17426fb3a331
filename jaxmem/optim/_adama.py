"""AdamA as optax transformations: Adam that accumulates into its moments.

A mini-batch of N micro-batches needs no gradient accumulator: each micro-batch's
gradient goes into the moments as soon as it exists (arXiv 2305.19982). Compared with
Adam on accumulated gradients this saves one copy of the parameters, and two where each
layer's gradient goes into the moments inside the backward pass. The first moment is the
same; the second moment is a different estimate, which is the price.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Int32, PyTree

from jaxmem._checks import check_axis_name, check_dtype, shown
from jaxmem.optim import _adama_rule
from jaxmem.optim._adama_arguments import (
    check_call,
    check_decays,
    check_mask,
    check_moment_shapes,
    check_rate,
    check_rule,
)
from jaxmem.optim._adama_rule import AdamARule, AdamAState, Mode, VScale
from jaxmem.optim.accumulation.devices import AxisName
from jaxmem.optim.accumulation.transformation import (
    accumulating_transformation,
    chain_after,
)
from jaxmem.optim.low_bit import adama as in_codes
from jaxmem.optim.low_bit.adama import low_bit_of
from jaxmem.optim.low_bit.low_bit import Bits, zeros
from jaxmem.optim.low_bit.moments import check_moments, is_leaf


def scale_by_adama(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: DTypeLike | None = None,
    nu_dtype: DTypeLike | None = None,
    *,
    micro_batches: int | Int32[Array, ""] = 1,
    mode: Mode = "paper",
    v_scale: VScale = "paper",
    nesterov: bool = False,
    axis_name: AxisName | None = None,
    bits: Bits | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Rescales updates by AdamA: Adam without a gradient accumulator.

    This is `optax.scale_by_adam` for a mini-batch that comes in N micro-batches. The
    gradient `g_i` of each micro-batch's mean loss goes into the moments::

      m <- b1 m,  v <- b2 v                               once, with the first one
      m <- m + (1 - b1) g_i / N                           for each
      v <- v + (1 - b2) (g_i / N)^2                       for each
      update = m / (1 - b1^t) / (sqrt(v / (1 - b2^t) + eps_root) + eps)

    with t the number of mini-batches.

    **How it differs from Adam on the whole mini-batch.** m is the same but for
    rounding. v takes the sum of squares where Adam takes the square of the sum. For
    micro-batch gradients of mean mu and standard deviation sigma its expectation is::

      (mu^2 + sigma^2) / N       with AdamA
      mu^2 + sigma^2 / N         with Adam on the whole mini-batch

    Steps are longer by the square root of their ratio: nothing where noise dominates,
    1.03 at mu / sigma = 0.1 and N = 8, up to sqrt(N) for noiseless gradients. With
    N = 1 the result is bitwise that of `optax.scale_by_adam` (for moments in float32
    or wider; narrower ones are here computed in float32 and rounded when stored).

    `v_scale="mean"` adds `(1 - b2) g_i^2 / N` instead. By Jensen's inequality v is then
    at least that of accumulated gradients, so a step is never longer, and up to sqrt(N)
    shorter where noise dominates.

    **How to call it.** There are three ways:

    1. `update(grads, state, params)` once a micro-batch. The updates are zero until the
       N-th, and transformations after this one in an `optax.chain` see those zeros:
       their weight decay and schedules run once a micro-batch. `adama`, or
       `jaxmem.optim.MultiSteps` around the chain, runs them once a mini-batch.
    2. `update(..., phase="accumulate")` once a micro-batch, which returns zeros, then
       `update(..., phase="apply")`, which ignores the values of the gradients. Extra
       arguments of the first: `micro_batches` replaces the constructor's; `weight`, a
       scalar, replaces 1/N, such as the share of this micro-batch's tokens in the
       mini-batch's (m is then that of their mean; in the other modes the gradient is
       multiplied by `weight * N`); `keep`, a bool scalar: if it is False, the gradient
       counts as zeros, even where it is NaN.
    3. `jaxmem.optim.accumulate_step` and `apply_step`, which do 2 for any chain.

    **On many devices.** Under `jax.jit` with sharded arrays there is nothing to do:
    each `g_i` is reduced over all devices before it gets here, once a micro-batch.
    Under `jax.shard_map` with an `axis_name` each device accumulates the gradients of
    its own N micro-batches until the end. For M devices along the axis, the rule is
    that of N M micro-batches on one device::

      m <- b1 m,  v <- M b2 v                             once, with the first one
      m, v as above, with the device's own g_i            for each
      m <- psum(m) / M,  v <- psum(v) / M^2               once, in "apply"

    One all-reduce of both moments, in their own dtypes, replaces N of the gradient. The
    longer steps above are then those of N M micro-batches, the result is Adam's to the
    bit only with N M = 1, and clipping before this transformation sees the gradient of
    one device. Each device decides its own `keep`; `weight` replaces 1/N, so a device's
    tokens count against the mean over the devices of their tokens in the mini-batch.
    Call it the second or third way, and begin each mini-batch with
    `jaxmem.optim.start_step`; the first way is for N = 1.

    Args:
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the denominator outside the square root.
      eps_root: added inside the square root.
      mu_dtype: dtype of the first moment; the parameter's by default. bfloat16 is fine.
      nu_dtype: dtype of the second moment; the parameter's by default. bfloat16 stalls
        with b2=0.999: an increment under 2**-9 of v is rounded away, so v cannot fall,
        nor rise by little. Pass float32 for bfloat16 parameters.
      micro_batches: N.
      mode: "paper", the rule above; "ema", every micro-batch decays and is bias
        corrected like a step of its own, without 1/N, and only the parameters wait
        (`count` then counts micro-batches); "fractional", the same with decays
        b ** (1/N), so that a mini-batch decays as much as one step of Adam.
      v_scale: "paper" or "mean", see above; for `mode="paper"` only.
      nesterov: Nesterov momentum (Dozat 2016). It needs the gradient of the whole
        mini-batch at its end, which AdamA does not keep: for N = 1 only, called the
        first way, without weight, keep and axis_name.
      axis_name: mesh axis, or axes, of the `jax.shard_map` (or `vmap`) this runs in,
        whose devices have micro-batches of their own, see above; for `mode="paper"`.
      bits: 8 or 4 for moments in codes, or a `jaxmem.optim.LowBit`, which has their
        bytes; `jaxmem.optim.scale_by_adam` has their error. They are rounded once a
        micro-batch, stochastically unless `LowBit` says otherwise, and the update is
        made of the rounded moments. Without dtypes. With an `axis_name` each device
        rounds moments of its own, with random numbers of its own; at the end they are
        summed in float32, a leaf at a time, the update is made of the sums, and these
        are rounded once more.

    Returns:
      An `optax.GradientTransformationExtraArgs` with an `AdamAState`. Updates have the
      gradients' dtypes; the moments of `init` have the parameters' shardings (under
      `jax.jit` give it `out_shardings`, as for any optax transformation).

    Raises:
      ValueError: an argument out of its range, or `nesterov` with micro-batches; from
        `update`, with an `axis_name`, gradients or moments that do not vary over it
        (where `check_vma=False` has not turned off the types that tell).
      TypeError: parameters that are no real floating arrays.

    Source:
      Zhang et al., "Adam Accumulation to Reduce Memory Footprints of both Activations
      and Gradients for Large-scale DNN Training" (2023), arXiv 2305.19982. `mode`,
      `v_scale="mean"` and `weight` are not in it; the factors of M are worked out from
      the rule.
    """
    axes = check_axis_name("axis_name", axis_name)
    b1, b2, eps, eps_root = check_decays(b1, b2, eps, eps_root)
    rule = AdamARule(b1, b2, eps, eps_root, mode, v_scale, nesterov, axes)
    check_rule(rule, micro_batches)
    for name, dtype in (("mu_dtype", mu_dtype), ("nu_dtype", nu_dtype)):
        if dtype is not None:
            check_dtype(name, dtype)

    how = None if bits is None else low_bit_of(bits, rule, (mu_dtype, nu_dtype))

    def init(params: PyTree) -> Any:
        if how is None:
            mu, nu = (_zeros(params, dtype) for dtype in (mu_dtype, nu_dtype))
        else:
            mu, nu = zeros(how, params)
        # a copy: an array given here must not be in two places of a donated state
        n = jnp.array(micro_batches, jnp.int32)
        count, micro_step = (jnp.zeros((), jnp.int32) for _ in range(2))
        return AdamAState(count, micro_step, n, mu, nu)

    def check(updates: PyTree, state: Any, *call: Any) -> None:
        check_call(rule, is_leaf, updates, state, *call)
        if how is None:
            check_moment_shapes(updates, state, is_leaf)
        else:
            check_moments(how, updates, state.mu, state.nu)

    if how is None:
        accumulate = functools.partial(_adama_rule.accumulate, rule)
        apply = functools.partial(_adama_rule.apply, rule)
    else:
        accumulate = functools.partial(in_codes.accumulate, how, rule)
        apply = functools.partial(in_codes.apply, how, rule)
    return accumulating_transformation(
        init,
        accumulate,
        lambda grads, state, params: apply(grads, state),
        check=check,
        micro_batches=micro_batches,
        axes=axes,
    )


def adama(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: DTypeLike | None = None,
    nu_dtype: DTypeLike | None = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    micro_batches: int | Int32[Array, ""] = 1,
    mode: Mode = "paper",
    v_scale: VScale = "paper",
    nesterov: bool = False,
    axis_name: AxisName | None = None,
    bits: Bits | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamA with a learning rate and decoupled weight decay.

    This is `optax.adam` and `optax.adamw` for a mini-batch that comes in micro-batches,
    without a gradient accumulator. `scale_by_adama` has the rule, how it differs from
    Adam on the whole mini-batch, and the ways to call it. Weight decay and learning
    rate act once a mini-batch, however it is called. With `micro_batches=1` the result
    is that of `optax.adam`, or of `optax.adamw` with this weight decay, bitwise in
    float32.

    `optax.inject_hyperparams(adama)` counts its calls for the schedules it is given:
    mini-batches under `MultiSteps`, `accumulate_step` and `apply_step`, micro-batches
    when called once a micro-batch.

    Args:
      learning_rate: a scalar, or a schedule of the number of finished mini-batches.
      b1, b2, eps, eps_root, mu_dtype, nu_dtype: see `scale_by_adama`.
      weight_decay: decoupled weight decay, multiplied by the learning rate. Unlike
        `optax.adamw` none by default.
      mask: where to decay the weights: a tree of bools, or a function of the parameters
        that gives one.
      micro_batches: N, the micro-batches of a mini-batch.
      mode, v_scale, nesterov, axis_name, bits: see `scale_by_adama`.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Its state is a chain's: `AdamAState`,
      that of the weight decay, that of the learning rate.

    Raises:
      ValueError, TypeError: as `scale_by_adama`.

    Source:
      Zhang et al. (2023), arXiv 2305.19982; weight decay as in arXiv 1711.05101.

    Example::

      tx = jaxmem.optim.adama(3e-4, weight_decay=0.1, micro_batches=8)
      state = tx.init(params)
      for micro_batch in data:  # the parameters move at every eighth
          grads = jax.grad(loss_fn)(params, micro_batch)
          updates, state = tx.update(grads, state, params)
          params = optax.apply_updates(params, updates)
    """
    moments = scale_by_adama(
        b1,
        b2,
        eps,
        eps_root,
        mu_dtype,
        nu_dtype,
        micro_batches=micro_batches,
        mode=mode,
        v_scale=v_scale,
        nesterov=nesterov,
        axis_name=axis_name,
        bits=bits,
    )
    learning_rate = check_rate("learning_rate", learning_rate)
    weight_decay = check_rate("weight_decay", weight_decay)
    check_mask(mask)
    none = isinstance(weight_decay, int | float) and weight_decay == 0
    decay = optax.identity() if none else optax.add_decayed_weights(weight_decay, mask)
    tail = optax.chain(decay, optax.scale_by_learning_rate(learning_rate))
    return chain_after(moments, tail, micro_batches)


def _zeros(params: PyTree, dtype) -> PyTree:
    def zeros(path, x):
        array = hasattr(x, "dtype") or isinstance(x, bool | int | float)
        given = jnp.result_type(x) if array else None
        if given is None or not jnp.issubdtype(given, jnp.floating):
            name = jax.tree_util.keystr(path)
            raise TypeError(
                f"params{name} is {shown(x)}: AdamA takes real floating parameters; "
                "leave others out with optax.masked or optax.partition"
            )
        return jnp.zeros_like(x, dtype=dtype or given)

    return jax.tree_util.tree_map_with_path(zeros, params)
