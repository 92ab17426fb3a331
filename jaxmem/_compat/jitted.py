"""What `jax.jit` was told."""

import functools
from typing import Any

import jax

_TREE = "treedef", "leaves"


def jit_info(fn) -> Any:
    """What `jax.jit` was told: `donate_argnums`, `static_argnames`, ...; or None."""
    # Positions and names are both complete: jax finds one by the other.
    return getattr(fn, "_jit_info", None)


def names_shardings(info) -> bool:
    """Whether `jit_info` has a sharding of an argument or a result."""
    leaves = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    return any(isinstance(s, jax.sharding.Sharding) for s in leaves)


def without_compiler_options(fn) -> Any:
    """A jitted function to call in another one, which takes no options in there."""
    info = jit_info(fn)
    return fn if info is None or not info.compiler_options_kvs else _rejitted(fn)


# Bounded: each holds a function. The same for one function, as JAX's caches ask.
@functools.lru_cache(maxsize=256)
def _rejitted(fn) -> Any:
    info, kinds = jit_info(fn), ("in_shardings", "out_shardings")
    trees = ((getattr(info, f"{k}_{part}") for part in _TREE) for k in kinds)
    shardings = [jax.tree.unflatten(*tree) for tree in trees]
    return jax.jit(
        fn.__wrapped__,
        **dict(zip(kinds, shardings, strict=True)),
        static_argnums=info.static_argnums,
        static_argnames=info.static_argnames,
        keep_unused=info.keep_unused,
    )
