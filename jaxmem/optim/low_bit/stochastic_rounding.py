"""bfloat16 parameters rounded stochastically, with nothing beside them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32, PyTree

from jaxmem.optim._by_keys import held_by_keys
from jaxmem.optim._state_class import check_class
from jaxmem.optim.low_bit import bfloat16
from jaxmem.optim.low_bit.random import counter_bits, seed_of


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
      count: int32[], steps; what is drawn depends on it.
      inner: that of the transformation inside.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    inner: Any


def stochastic_rounding(
    tx: optax.GradientTransformation, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Rounds new bfloat16 parameters up or down at random, so that small steps count.

    A step of less than 2**-9 of a bfloat16 parameter is lost when the sum is rounded to
    the nearest. Here `p + u` in float32 becomes one of both bfloat16 numbers beside it,
    the nearer one more often, so that its expectation is `p + u`::

      p <- upper with probability (p + u - lower) / (upper - lower), else lower

    The updates that come out are the differences, in float32; `optax.apply_updates`
    adds them to exactly that number. What is drawn is a hash of the seed, the step, the
    leaf and the element: the same on any number of devices.

    **State**: a counter beside that of `tx`; 2 bytes a parameter for the parameters.
    The error of a parameter is that of a random walk of single roundings, which a
    float32 master does not have; `split_master` has less for one byte.

    Args:
      tx: any transformation whose updates are to be added, learning rate included. It
        sees gradients and bfloat16 parameters as they are, the latter in float32.
      seed: from 0 to 2**32 - 1.

    Returns:
      A transformation whose `update` needs the parameters. Leaves that are not bfloat16
      are updated as `tx` says.

    Raises:
      TypeError: `tx` is no transformation.
      ValueError: from `init`, parameters of which none is bfloat16; from `update`,
        missing parameters.

    Source:
      Zamirai et al., "Revisiting BFloat16 Training", arXiv 2010.06192.

    Example::

      tx = jaxmem.optim.stochastic_rounding(jaxmem.optim.adamw(3e-4, bits=8))
      params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    """
    name, seed = "stochastic_rounding", bfloat16.check_seed(seed)
    tx = bfloat16.checked(name, tx)

    def init(params: PyTree) -> Any:
        bfloat16.check_narrow(name, params)
        inner = tx.init(bfloat16.widened(params))
        return StochasticRoundingState(jnp.zeros((), jnp.int32), inner)

    def update(updates: PyTree, state: Any, params: Any = None, **extra: Any) -> Any:
        check_class(name, state, StochasticRoundingState)
        params = bfloat16.required(name, params)
        wide = bfloat16.widened(params)
        updates = bfloat16.widened(updates)
        updates, inner = tx.update(updates, state.inner, wide, **extra)

        def rounded(path, u, p):
            if u is None or not bfloat16.is_narrow(p):
                return (u,)
            bits = counter_bits(seed_of(path, seed, state.count), p.shape)
            total = p.astype(jnp.float32) + u.astype(jnp.float32)
            return (bfloat16.difference(p, bfloat16.stochastic(total, bits))[0],)

        with jax.named_scope("jaxmem.stochastic_rounding"):
            (updates,) = bfloat16.map_leaves(rounded, 1, updates, params)
        count: Any = optax.safe_increment(state.count)
        return updates, StochasticRoundingState(count, inner)

    return held_by_keys(optax.GradientTransformationExtraArgs(init, update))
