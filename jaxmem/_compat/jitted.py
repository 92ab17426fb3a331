"""What `jax.jit` was told."""

from typing import Any

import jax


def jit_info(fn) -> Any:
    """What `jax.jit` was told: `donate_argnums`, `static_argnames`, ...; or None."""
    # Positions and names are both complete: jax finds one by the other.
    return getattr(fn, "_jit_info", None)


def names_shardings(info) -> bool:
    """Whether `jit_info` has a sharding of an argument or a result."""
    leaves = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    return any(isinstance(s, jax.sharding.Sharding) for s in leaves)
