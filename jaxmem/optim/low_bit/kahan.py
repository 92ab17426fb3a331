"""bfloat16 parameters with Kahan summation: what was rounded off is kept."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from jaxmem.optim._by_keys import held_by_keys
from jaxmem.optim._state_class import check_class
from jaxmem.optim.low_bit import bfloat16


class KahanState(NamedTuple):
    """State of `kahan_summation`.

    Attributes:
      rest: what the parameters lack, bfloat16, of their shapes; None where they are of
        another dtype.
      inner: that of the transformation inside.
    """

    ledger_parts = {"rest": "masters"}  # what `jaxmem.ledger` calls it
    rest: PyTree
    inner: Any


def kahan_summation(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Keeps what bfloat16 parameters lose by rounding, and adds it to the next update.

    ::

      k <- bf16(k + u)
      new = bf16(p + k),  k <- bf16(k + (p - new)),  p <- new

    The updates that come out are `new - p` in float32; `optax.apply_updates` adds them
    to exactly `new`. The sum `k + u` is rounded to bfloat16 itself, to the nearest, so
    that very small updates leave a bias: 10,000 additions of 1e-4 to 1.0 end at 2.03,
    and those of 1e-5 are lost.

    **State**: 2 bytes a parameter. `split_master` has 1 or 2 and less error.

    Args:
      tx: any transformation whose updates are to be added, learning rate included. It
        sees bfloat16 gradients and parameters in float32.

    Returns:
      A transformation whose `update` needs the parameters. Leaves that are not bfloat16
      are updated as `tx` says.

    Raises:
      TypeError: `tx` is no transformation.
      ValueError: from `init`, parameters of which none is bfloat16; from `update`,
        missing parameters.

    Source:
      Zamirai et al., "Revisiting BFloat16 Training", arXiv 2010.06192, algorithm 3.

    Example::

      tx = jaxmem.optim.kahan_summation(optax.adamw(3e-4))
      params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    """
    name = "kahan_summation"
    tx = bfloat16.checked(name, tx)

    def init(params: PyTree) -> Any:
        bfloat16.check_narrow(name, params)
        zeros = lambda p: jnp.zeros_like(p) if bfloat16.is_narrow(p) else None
        rest = jax.tree.map(zeros, params)
        return KahanState(rest, tx.init(bfloat16.widened(params)))

    def update(updates: PyTree, state: Any, params: Any = None, **extra: Any) -> Any:
        check_class(name, state, KahanState)
        params = bfloat16.required(name, params)
        wide = bfloat16.widened(params)
        updates = bfloat16.widened(updates)
        updates, inner = tx.update(updates, state.inner, wide, **extra)

        def summed(path, u, p, k):
            del path
            if u is None or k is None:
                return u, k
            total = bfloat16.nearest(k.astype(jnp.float32) + u.astype(jnp.float32))
            old = p.astype(jnp.float32)
            update, new = bfloat16.difference(p, bfloat16.nearest(old + total))
            rest = bfloat16.nearest(total + (old - new))
            return update, rest.astype(jnp.bfloat16)

        with jax.named_scope("jaxmem.kahan_summation"):
            updates, rest = bfloat16.map_leaves(summed, 2, updates, params, state.rest)
        return updates, KahanState(rest, inner)

    return held_by_keys(optax.GradientTransformationExtraArgs(init, update))
