"""SM3, right on stacked layers."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from jaxmem._paths import check_selection
from jaxmem.optim._adama_arguments import check_rate
from jaxmem.optim._by_keys import held_by_keys
from jaxmem.optim._state_class import check_class
from jaxmem.optim.accumulation.dtypes import accumulation_dtype
from jaxmem.optim.factored.arguments import number
from jaxmem.optim.factored.leaves import (
    check_real,
    check_shape,
    layer_axes,
    map_leaves,
    widened,
)
from jaxmem.optim.low_bit.low_bit import LowBit
from jaxmem.optim.low_bit.momentum import momentum_of

WHO = "SM3"


class Sm3State(NamedTuple):
    """State of SM3: trees of the parameters' structure, in float32 or wider."""

    cover: PyTree  # a tuple of accumulators, one an axis; of a vector itself one
    mu: PyTree  # momentum, of the parameter's shape, or `MomentCodes`


def scale_by_sm3(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 1.0,
    eps: ArrayLike = 1e-8,
    *,
    stacked: Any = None,
    bits: int | LowBit = 32,
) -> optax.GradientTransformation:
    """Rescales updates by SM3 (its second form, with momentum), as optax does.

    A layer has an accumulator a_i for each axis i: of the length of that axis, and for
    each index the largest of what has been seen there::

      v = min over i of a_i + g^2                (b2 v + (1 - b2) g^2 where b2 < 1)
      a_i <- max of v over all axes but i
      m <- b1 m + (1 - b1) g rsqrt(v + eps),  0 where v = 0
      update = m

    A vector has v itself. Differs from `optax.scale_by_sm3` in that the layers of a
    stacked leaf share nothing, that the state is float32 for bfloat16 parameters, and
    that scalars are taken. State: 4 bytes a parameter for m, 1.06 with `bits=8`, 0.53
    with `bits=4`, and `4 (m + n)` for a matrix [m, n]; of a vector 4 bytes a parameter
    beside m. Micro-batches are accumulated in a sum. A gradient that is not finite
    stays in the state.

    Args:
      b1: decay of the momentum, in [0, 1).
      b2: decay of the squares, in (0, 1]; 1 is a sum, as Adagrad's.
      eps: added to v under the root.
      stacked: which leaves have layers along axis 0, see `scale_by_came`.
      bits: of the first moment: 8, 4, 32 (float32), or a `LowBit`. With codes it is
        rounded to the nearest after each step, as that of `adam` is; the update is made
        of what it was before.

    Returns:
      An `optax.GradientTransformation` with an `Sm3State`. Updates have the gradients'
      dtypes.

    Raises:
      ValueError: an argument out of range; from `update`, a state of other parameters.
      TypeError: an argument of another kind, parameters that are no real floats.

    Source:
      Anil et al., "Memory-Efficient Adaptive Optimization" (2019), arXiv 1901.11150,
      SM3-II.

    Example::

      tx = optax.chain(jaxmem.optim.scale_by_sm3(), optax.scale_by_learning_rate(0.1))
    """
    b1 = number("b1", b1, at_least=0, below=1)
    b2 = number("b2", b2, above=0, at_most=1)
    eps = number("eps", eps, at_least=0)
    check_selection("stacked", stacked)
    momentum = momentum_of(bits)

    def init(params):
        check_real(WHO, params)
        layers = iter(layer_axes(WHO, stacked, params))
        start = lambda path, p: (_start(p, next(layers)),)
        (cover,) = map_leaves(WHO, 1, start, params)
        return Sm3State(cover, momentum.zeros(params))

    def update(updates, state, params=None):
        del params
        check_class(WHO, state, Sm3State)
        momentum.check(updates, state.mu)
        layers = iter(layer_axes(WHO, stacked, updates))

        def step(path, g, cover, mu):
            old = momentum.loaded(mu)
            u, cover, new = _step(b1, b2, eps, next(layers), path, g, cover, old)
            return u, cover, momentum.stored(new, mu)

        with jax.named_scope("jaxmem.scale_by_sm3"):
            new, cover, mu = map_leaves(WHO, 3, step, updates, *state)
        return new, Sm3State(cover, mu)

    return held_by_keys(optax.GradientTransformation(init, update))


def _others(ndim: int, layers: int) -> list[tuple[int, ...]]:
    """For each accumulator the axes that it is the maximum over."""
    axes = range(layers, ndim)
    if len(axes) < 2:
        return [()]
    return [tuple(a for a in axes if a != axis) for axis in axes]


def _start(p, layers: int):
    dtype = accumulation_dtype(p)
    # A maximum's type has the sharding of the axes that stay.
    kinds = (
        jax.eval_shape(lambda x, axes=axes: jnp.max(x, axes), p) if axes else p
        for axes in _others(p.ndim, layers)
    )
    return tuple(jnp.zeros_like(kind, dtype=dtype) for kind in kinds)


def _step(b1, b2, eps, layers: int, path: str, g, cover, mu):
    check_shape(WHO, path, mu.shape, g.shape)
    others = _others(g.ndim, layers)
    wanted = [[n for i, n in enumerate(g.shape) if i not in axes] for axes in others]
    found = [a.shape for a in cover]
    check_shape(WHO, path, sum(found, ()), sum(map(tuple, wanted), ()))
    x = g.astype(mu.dtype)
    wide = [jnp.expand_dims(a, axes) for a, axes in zip(cover, others, strict=True)]
    new = 1.0 if isinstance(b2, int | float) and b2 == 1 else 1 - b2
    v = new * jnp.square(x) + b2 * functools.reduce(jnp.minimum, wide)
    root = jnp.where(v > 0, jax.lax.rsqrt(v + eps), jnp.zeros_like(v))
    mu = b1 * mu + (1 - b1) * (x * root)
    cover = tuple(jnp.max(v, axes) if axes else v for axes in others)
    return mu.astype(g.dtype), cover, mu


def sm3(
    learning_rate: optax.ScalarOrSchedule,
    momentum: ArrayLike = 0.9,
    *,
    stacked: Any = None,
    bits: int | LowBit = 32,
) -> optax.GradientTransformationExtraArgs:
    """SM3 with a learning rate: `optax.sm3`, on each layer of a stacked leaf.

    `scale_by_sm3` has the rule. `p <- p - learning_rate update`, computed in float32
    and cast once.

    Args:
      learning_rate: a scalar, or a schedule of the number of steps.
      momentum: decay of the momentum, in [0, 1).
      stacked, bits: see `scale_by_sm3`.

    Returns:
      An `optax.GradientTransformationExtraArgs`; its state is the momentum, and little
      else.

    Raises:
      ValueError, TypeError: as `scale_by_sm3`.

    Source:
      Anil et al. (2019), arXiv 1901.11150.

    Example::

      tx = jaxmem.optim.sm3(0.1, stacked="layers")
    """
    b1 = number("momentum", momentum, at_least=0, below=1)
    rate = optax.scale_by_learning_rate(check_rate("learning_rate", learning_rate))
    return widened(optax.chain(scale_by_sm3(b1, stacked=stacked, bits=bits), rate))
