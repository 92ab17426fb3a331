"""`jax.vmap` of attention as attention to more examples."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def joins_batch(run: Callable[[dict], Any]) -> Callable[[dict], Any]:
    """`run` of a dict of arrays; under `vmap` the mapped axis joins the first one."""
    folding = custom_vmap(run)

    @folding.def_vmap
    def _(size: int, mapped: Any, arrays: dict):
        (along,) = mapped
        together = {name: _folded(size, x, along[name]) for name, x in arrays.items()}
        outs = folding(together)
        outs = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), outs)
        return outs, jax.tree.map(lambda _: True, outs)

    return folding


def _folded(size: int, x, mapped: bool | None):
    """[size, b, ...] as [size * b, ...]."""
    if x is None:
        return None
    x = x if mapped else jnp.broadcast_to(x, (size, *x.shape))
    return x.reshape(-1, *x.shape[2:])
