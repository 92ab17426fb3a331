"""`jax.vmap` of attention as attention to more examples."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def joins_batch(
    run: Callable[[dict], Any], within: bool = False
) -> Callable[[dict], Any]:
    """`run` of a dict of arrays; under `vmap` the mapped axis joins the first one.

    `within`: as the faster one of the two, which takes copies, but leaves a first axis
    that is sharded as it is.
    """
    folding = custom_vmap(run)

    @folding.def_vmap
    def _(size: int, mapped: Any, arrays: dict):
        (along,) = mapped
        together = {
            name: _folded(size, x, along[name], within) for name, x in arrays.items()
        }
        outs = jax.tree.map(lambda x: _apart(size, x, within), folding(together))
        return outs, jax.tree.map(lambda _: True, outs)

    return folding


def _folded(size: int, x, mapped: bool | None, within: bool):
    """[size, b, ...] as [size * b, ...]."""
    if x is None:
        return None
    x = x if mapped else jnp.broadcast_to(x, (size, *x.shape))
    x = jnp.swapaxes(x, 0, 1) if within else x
    return x.reshape(-1, *x.shape[2:])


def _apart(size: int, x, within: bool):
    """[size * b, ...] as [size, b, ...]."""
    if within:
        return jnp.swapaxes(x.reshape(-1, size, *x.shape[1:]), 0, 1)
    return x.reshape(size, -1, *x.shape[1:])
