"""Rounding to bfloat16 that XLA leaves in, and what of it a parameter can take.

XLA drops a cast to bfloat16 that is cast back at once. Where the rounded value matters
it comes from `lax.reduce_precision` or from the bits of the number.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, BFloat16, Float32, PyTree, UInt32

from jaxmem._checks import check_int, shown

_EXPONENT = 0x7F800000
_LEAST = 2.0**-118  # half a unit of it is the smallest normal float32


def nearest(x: Float32[Array, "*s"]) -> Float32[Array, "*s"]:
    """The nearest bfloat16, as float32."""
    return lax.reduce_precision(x, 8, 7)


def stochastic(
    x: Float32[Array, "*s"], bits: UInt32[Array, "*s"]
) -> Float32[Array, "*s"]:
    """One of both bfloat16 beside x, as float32: without bias, exact where x is one."""
    whole = lax.bitcast_convert_type(x, jnp.uint32) + (bits >> 16)
    rounded = lax.bitcast_convert_type(whole & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x)  # bits would make infinity NaN


def half_unit(x: Float32[Array, "*s"]) -> Float32[Array, "*s"]:
    """Half the distance of neighbouring bfloat16 numbers at the bfloat16 x."""
    exponent = lax.bitcast_convert_type(x, jnp.int32) & _EXPONENT
    power = lax.bitcast_convert_type(exponent, jnp.float32)
    return jnp.maximum(power, _LEAST) * 2.0**-8


def difference(
    old: BFloat16[Array, "*s"], new: Float32[Array, "*s"]
) -> tuple[Float32[Array, "*s"], Float32[Array, "*s"]]:
    """The update from one bfloat16 to another, and where it ends, as float32.

    It ends at `new`, but where that is 2**16 times smaller than `old`, or larger: then
    the difference is rounded to float32.
    """
    wide = old.astype(jnp.float32)
    update = new - wide
    return update, nearest(wide + update)


def is_narrow(x: Any) -> bool:
    """Whether a leaf is bfloat16; the others are updated as they are."""
    return getattr(x, "dtype", None) == jnp.bfloat16


def widened(tree: PyTree) -> Any:
    """The bfloat16 leaves in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if is_narrow(x) else x, tree)


def check_narrow(name: str, params: PyTree) -> None:
    """ValueError for parameters none of which is bfloat16."""
    if not any(map(is_narrow, jax.tree.leaves(params))):
        raise ValueError(
            f"{name}: none of the parameters is bfloat16, so there is nothing to "
            "round; cast them, or leave the wrapper out"
        )


def required(name: str, params: PyTree | None) -> PyTree:
    """ValueError for an update that was not given the parameters."""
    if params is None:
        raise ValueError(
            f"params=None: {name} rounds the new parameters, and needs the old ones: "
            "update(grads, state, params)"
        )
    return params


def checked(name: str, tx: Any) -> Any:
    """A transformation whose update takes extra arguments."""
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(f"{name}: tx={shown(tx)}: an optax.GradientTransformation")
    return optax.with_extra_args_support(tx)


def check_seed(seed: Any) -> int:
    """A seed, as a Python int."""
    return check_int("seed", seed, 0, 2**32 - 1)


def map_leaves(fn: Callable[..., Any], results: int, *trees: PyTree) -> Any:
    """Trees of the `results` values of `fn(path, *leaves)`; None is a leaf."""
    is_gap = lambda x: x is None
    leaves, tree = jax.tree_util.tree_flatten_with_path(trees[0], is_leaf=is_gap)
    others = [jax.tree.leaves(t, is_leaf=is_gap) for t in trees[1:]]
    done = [
        fn(path, leaf, *rest)
        for (path, leaf), *rest in zip(leaves, *others, strict=True)
    ]
    return tuple(tree.unflatten([x[i] for x in done]) for i in range(results))
