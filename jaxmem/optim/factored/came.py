"""CAME: Adafactor with momentum, slowed where momentum and update disagree."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from jaxmem._checks import check_bool
from jaxmem._paths import check_selection
from jaxmem.optim._by_keys import held_by_keys
from jaxmem.optim._state_class import check_class
from jaxmem.optim.factored import moments
from jaxmem.optim.factored.arguments import decay, decayed_rate, number, pair
from jaxmem.optim.factored.leaves import (
    check_real,
    check_shape,
    layer_axes,
    map_leaves,
    widened,
)
from jaxmem.optim.factored.rms import clipped
from jaxmem.optim.low_bit.low_bit import LowBit
from jaxmem.optim.low_bit.momentum import Momentum, momentum_of

WHO = "CAME"


class CameState(NamedTuple):
    """State of CAME: trees of the parameters' structure, in float32 or wider."""

    mu: PyTree  # of the parameter's shape, or `MomentCodes`
    nu: PyTree  # `FactoredMoment` of a matrix; of a vector its shape
    instability: PyTree  # `FactoredMoment` of a matrix; of a vector nothing


class CameRule(NamedTuple):
    b1: Any
    b2: Any
    b3: Any
    eps: tuple[Any, Any]
    clip_threshold: Any
    per_layer: bool
    momentum: Momentum


def scale_by_came(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    b3: ArrayLike = 0.9999,
    eps: tuple[ArrayLike, ArrayLike] = (1e-30, 1e-16),
    clip_threshold: ArrayLike = 1.0,
    *,
    stacked: Any = None,
    per_layer: bool = True,
    bits: int | LowBit = 32,
) -> optax.GradientTransformation:
    """Rescales updates by CAME.

    For a matrix, with R and C the means of a matrix over its columns and rows, and
    `F(R, C) = rsqrt(R / mean(R)) rsqrt(C)^T`::

      R, C <- b2 (R, C) + (1 - b2) means(g^2 + eps[0])
      u = g F(R, C),  u = u / max(1, RMS(u) / clip_threshold)
      m <- b1 m + (1 - b1) u
      R', C' <- b3 (R', C') + (1 - b3) means((u - m)^2 + eps[1])
      update = m F(R', C')

    and for a vector, whose second moment v is kept whole::

      v <- b2 v + (1 - b2) (g^2 + eps[0]),  u = g rsqrt(v), clipped as above
      m <- b1 m + (1 - b1) u,  update = m

    There is no bias correction. State: 4 bytes a parameter for m, 1.06 with `bits=8`,
    0.53 with `bits=4`, and `8 (m + n)` for a matrix [m, n]; of a vector 4 bytes a
    parameter beside m. Micro-batches are accumulated in a
    sum: what follows depends on the square of the whole gradient.

    A gradient that is not finite makes the means that it enters, and from then on the
    whole layer, not finite: leave such steps out, as `jaxmem.microbatch(...,
    skip_nonfinite=True)` or `optax.apply_if_finite` do.

    Args:
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment.
      b3: decay of the instability, the square of what u and m differ by.
      eps: added to g^2, and to (u - m)^2.
      clip_threshold: the most RMS of an update, more than 0.
      stacked: which leaves have layers along axis 0, as `clip_by_layer_norm` takes
        them: patterns of paths, a function of the path, a tree of bools. By default all
        axes but the last two count layers, and a leaf of two axes is one matrix: biases
        of stacked layers, [L, n], must be named to be L vectors. The matrix is that of
        the two largest axes that count no layers, others are batch axes.
      per_layer: RMS(u) is a layer's, so that `jaxmem.schedule` can update each layer
        inside the backward pass; False: of the whole leaf, as in the reference.
      bits: of the first moment: 8, 4, 32 (float32), or a `LowBit`. With codes it is
        rounded to the nearest after each step, as that of `adam` is; the update is made
        of what it was before.

    Returns:
      An `optax.GradientTransformation` with a `CameState`. Updates have the gradients'
      dtypes, the state is float32, or wider with the parameters.

    Raises:
      ValueError: an argument out of range; from `update`, a state of other parameters.
      TypeError: an argument of another kind, parameters that are no real floats.

    Source:
      Luo et al., "CAME: Confidence-guided Adaptive Memory Efficient Optimization"
      (2023), arXiv 2307.02047. RMS a layer is not in it. 8 bits as in Xie et al., "SANA
      1.5" (2025), arXiv 2501.18427, with other codes.

    Example::

      tx = optax.chain(jaxmem.optim.scale_by_came(), optax.scale_by_learning_rate(2e-4))
    """
    b1, b2, b3 = decay("b1", b1), decay("b2", b2), decay("b3", b3)
    threshold = number("clip_threshold", clip_threshold, above=0)
    per_layer = check_bool("per_layer", per_layer)
    small, momentum = pair("eps", eps), momentum_of(bits)
    rule = CameRule(b1, b2, b3, small, threshold, per_layer, momentum)
    check_selection("stacked", stacked)

    def init(params):
        check_real(WHO, params)
        layers = iter(layer_axes(WHO, stacked, params))
        start = lambda path, p: _start(p, next(layers))
        return CameState(momentum.zeros(params), *map_leaves(WHO, 2, start, params))

    def update(updates, state, params=None):
        del params
        check_class(WHO, state, CameState)
        momentum.check(updates, state.mu)
        layers = iter(layer_axes(WHO, stacked, updates))
        step = lambda *leaf: _step(rule, next(layers), *leaf)
        with jax.named_scope("jaxmem.scale_by_came"):
            new, *kept = map_leaves(WHO, 4, step, updates, *state)
        return new, CameState(*kept)

    return held_by_keys(optax.GradientTransformation(init, update))


def _start(p, layers: int):
    axes = moments.matrix_axes(p.shape, layers)
    instability = optax.EmptyState() if axes is None else moments.zeros(p, axes)
    return moments.zeros(p, axes), instability


def _step(rule: CameRule, layers: int, path: str, g, stored, nu, instability):
    axes, mu = moments.matrix_axes(g.shape, layers), rule.momentum.loaded(stored)
    check_shape(WHO, path, mu.shape, g.shape)
    moments.check_moment(WHO, path, nu, g, axes)
    x = g.astype(mu.dtype)
    nu = moments.averaged(nu, jnp.square(x) + rule.eps[0], rule.b2, 1 - rule.b2, axes)
    u = moments.divided_by_root(x, nu, axes)
    u = clipped(u, rule.clip_threshold, layers if rule.per_layer else 0)
    mu = rule.b1 * mu + (1 - rule.b1) * u
    kept = rule.momentum.stored(mu, stored)
    if axes is None:
        return mu.astype(g.dtype), kept, nu, instability
    moments.check_moment(WHO, path, instability, g, axes)
    apart = jnp.square(u - mu) + rule.eps[1]
    instability = moments.averaged(instability, apart, rule.b3, 1 - rule.b3, axes)
    update = moments.divided_by_root(mu, instability, axes)
    return update.astype(g.dtype), kept, nu, instability


def came(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    b3: ArrayLike = 0.9999,
    eps: tuple[ArrayLike, ArrayLike] = (1e-30, 1e-16),
    clip_threshold: ArrayLike = 1.0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    stacked: Any = None,
    per_layer: bool = True,
    bits: int | LowBit = 32,
) -> optax.GradientTransformationExtraArgs:
    """CAME with a learning rate and decoupled weight decay.

    `scale_by_came` has the rule. `p <- p - learning_rate (update + weight_decay p)`,
    computed in float32 and cast once. The paper takes 0.5 to 0.9 of AdamW's learning
    rate, and b3 between 0.9995 and 0.99995 for b2 = 0.999.

    Args:
      learning_rate: a scalar, or a schedule of the number of steps.
      b1, b2, b3, eps, clip_threshold, stacked, per_layer, bits: see `scale_by_came`.
      weight_decay: decoupled weight decay, multiplied by the learning rate; with it
        `update` needs the parameters.
      mask: where to decay the weights: a tree of bools, or a function of the parameters
        that gives one.

    Returns:
      An `optax.GradientTransformationExtraArgs`; its state is the first moment, and
      little else.

    Raises:
      ValueError, TypeError: as `scale_by_came`.

    Source:
      Luo et al. (2023), arXiv 2307.02047.

    Example::

      tx = jaxmem.optim.came(2e-4, weight_decay=1e-2, stacked="layers")
    """
    rule = scale_by_came(
        *(b1, b2, b3, eps, clip_threshold),
        stacked=stacked,
        per_layer=per_layer,
        bits=bits,
    )
    tail = decayed_rate(learning_rate, weight_decay, mask)
    return widened(optax.chain(rule, tail))
