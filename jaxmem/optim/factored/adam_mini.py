"""Adam-mini: Adam with one second moment a block, by the structure of the leaves."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int32, PyTree

from jaxmem._paths import check_selection
from jaxmem.optim._by_keys import held_by_keys
from jaxmem.optim._state_class import check_class
from jaxmem.optim.accumulation.dtypes import accumulation_dtype
from jaxmem.optim.factored import blocks as blocks_
from jaxmem.optim.factored.arguments import decay, decayed_rate, number
from jaxmem.optim.factored.leaves import (
    check_real,
    check_shape,
    layer_axes,
    map_leaves,
    widened,
)
from jaxmem.optim.low_bit.low_bit import LowBit
from jaxmem.optim.low_bit.momentum import momentum_of

WHO = "Adam-mini"


class AdamMiniState(NamedTuple):
    """State of Adam-mini: trees of the parameters' structure, in float32 or wider."""

    # finished steps; a tuple has a method of this name
    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: PyTree  # of the parameter's shape, or `MomentCodes`
    nu: PyTree  # of the shape of the blocks, [layers..., blocks...]


def scale_by_adam_mini(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    *,
    blocks: Mapping[Any, Any] | None = None,
    full: Any = None,
    stacked: Any = None,
    bits: int | LowBit = 32,
) -> optax.GradientTransformation:
    """Rescales updates by Adam-mini: one second moment for each block of a leaf.

    ::

      m <- b1 m + (1 - b1) g
      v_k <- b2 v_k + (1 - b2) mean over block k of g^2
      update = m / (1 - b1^t) / (sqrt(v_k / (1 - b2^t)) + eps)

    Which elements make a block goes by the shape of a layer, not by names:

    - a matrix [m, n], a Flax kernel [in, out]: a block an output, which is n numbers of
      m elements each; with more axes, one an index of the last;
    - a vector or scalar of a layer: one block;
    - what `blocks` says: how many along each axis of a layer, -1 for one an index. The
      paper has rows of embeddings, (-1, 1) in `optax`'s and Flax's [vocabulary, width],
      and heads of query and key kernels, (1, heads) of [in, heads * d] and
      (1, heads, 1) of [in, heads, d];
    - what `full` says: a block an element, which is Adam; the paper has biases so.

    State: 4 bytes a parameter for m, 1.06 with `bits=8`, 0.53 with `bits=4`, and 4
    bytes a block. Micro-batches are accumulated in a sum. A gradient that is not finite
    stays in the state.

    Args:
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the denominator.
      blocks: a dict from path patterns, as `jaxmem.trainable` takes them, to numbers of
        blocks; the first pattern that matches a leaf holds.
      full: which leaves have all their second moments: patterns of paths, a function of
        the path, or a tree of bools. It holds before `blocks`.
      stacked: which leaves have layers along axis 0, see `scale_by_came`; by default
        all axes but the last two count layers.
      bits: of the first moment: 8, 4, 32 (float32), or a `LowBit`. With codes it is
        rounded to the nearest after each step, as that of `adam` is; the update is made
        of what it was before.

    Returns:
      An `optax.GradientTransformation` with an `AdamMiniState`. Updates have the
      gradients' dtypes.

    Raises:
      ValueError: an argument out of range, a pattern without a match, blocks that do
        not divide a leaf; from `update`, a state of other parameters.
      TypeError: an argument of another kind, parameters that are no real floats.

    Source:
      Zhang et al., "Adam-mini: Use Fewer Learning Rates To Gain More" (2024), arXiv
      2406.16793; its partition goes by the parameters' names.

    Example::

      rule = jaxmem.optim.scale_by_adam_mini(
          blocks={"**/table": (-1, 1), "**/kernel": (1, 16)}, full="head"
      )
      tx = optax.chain(rule, optax.scale_by_learning_rate(3e-4))
    """
    b1, b2 = decay("b1", b1), decay("b2", b2)
    eps = number("eps", eps, at_least=0)
    check_selection("full", full)
    check_selection("stacked", stacked)
    given, momentum = blocks_.check_blocks(blocks), momentum_of(bits)

    def all_counts(tree):
        layers = layer_axes(WHO, stacked, tree)
        return iter(blocks_.all_counts(WHO, given, full, tree, layers))

    def init(params):
        check_real(WHO, params)
        counts = all_counts(params)
        start = lambda path, p: (_start(p, next(counts)),)
        (nu,) = map_leaves(WHO, 1, start, params)
        return AdamMiniState(jnp.zeros((), jnp.int32), momentum.zeros(params), nu)

    def update(updates, state, params=None):
        del params
        check_class(WHO, state, AdamMiniState)
        momentum.check(updates, state.mu)
        counts = all_counts(updates)
        count = jnp.asarray(optax.safe_increment(state.count))
        rule = AdamMiniRule(b1, b2, eps, count)

        def step(path, g, mu, nu):
            old = momentum.loaded(mu)
            u, new, nu = _step(rule, next(counts), path, g, old, nu)
            return u, momentum.stored(new, mu), nu

        with jax.named_scope("jaxmem.scale_by_adam_mini"):
            new, mu, nu = map_leaves(WHO, 3, step, updates, state.mu, state.nu)
        return new, AdamMiniState(count, mu, nu)

    return held_by_keys(optax.GradientTransformation(init, update))


class AdamMiniRule(NamedTuple):
    b1: Any
    b2: Any
    eps: Any
    step: Int32[Array, ""]  # from 1 on


def _start(p, counts):
    dtype = accumulation_dtype(p)
    if tuple(counts) == p.shape[p.ndim - len(counts) :]:
        return jnp.zeros_like(p, dtype=dtype)
    # The type of a mean has the sharding of the axes that stay.
    kind = jax.eval_shape(lambda x: blocks_.means(x, counts), p)
    return jnp.zeros_like(kind, dtype=dtype)


def _step(rule: AdamMiniRule, counts, path: str, g, mu, nu):
    check_shape(WHO, path, mu.shape, g.shape)
    check_shape(WHO, path, nu.shape, (*g.shape[: g.ndim - len(counts)], *counts))
    x = g.astype(mu.dtype)
    mu = rule.b1 * mu + (1 - rule.b1) * x
    nu = rule.b2 * nu + (1 - rule.b2) * blocks_.means(jnp.square(x), counts)
    first, second = (
        1 - jnp.power(jnp.asarray(b, x.dtype), rule.step.astype(x.dtype))
        for b in (rule.b1, rule.b2)
    )
    # Of the blocks' size: the root and the division are taken once a block.
    step = 1 / (jnp.sqrt(nu / second) + rule.eps) / first
    return (mu * blocks_.spread(step, x.shape, counts)).astype(g.dtype), mu, nu


def adam_mini(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    blocks: Mapping[Any, Any] | None = None,
    full: Any = None,
    stacked: Any = None,
    bits: int | LowBit = 32,
) -> optax.GradientTransformationExtraArgs:
    """Adam-mini with a learning rate and decoupled weight decay.

    `scale_by_adam_mini` has the rule and the blocks. `p <- p - learning_rate (update +
    weight_decay p)`, computed in float32 and cast once.

    Args:
      learning_rate: a scalar, or a schedule of the number of steps.
      b1, b2, eps, blocks, full, stacked, bits: see `scale_by_adam_mini`.
      weight_decay: decoupled weight decay, multiplied by the learning rate; with it
        `update` needs the parameters.
      mask: where to decay the weights: a tree of bools, or a function of the parameters
        that gives one.

    Returns:
      An `optax.GradientTransformationExtraArgs`; its state is the first moment, and
      little else.

    Raises:
      ValueError, TypeError: as `scale_by_adam_mini`.

    Source:
      Zhang et al. (2024), arXiv 2406.16793.

    Example::

      tx = jaxmem.optim.adam_mini(3e-4, blocks={"**/table": (-1, 1)}, stacked="layers")
    """
    how = {"blocks": blocks, "full": full, "stacked": stacked, "bits": bits}
    rule = scale_by_adam_mini(b1, b2, eps, **how)
    tail = decayed_rate(learning_rate, weight_decay, mask)
    return widened(optax.chain(rule, tail))
