"""Micro-batches on several devices of a `jax.shard_map`: what is made one, and when.

Parameters and optimizer state come in replicated. Gradients are taken at each device's
own copy of the parameters, since those of replicated ones are summed over the devices
at once; what the step returns is replicated again. Without axes nothing happens here.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from jaxmem._compat import varying_axes
from jaxmem.accumulate._trees import choose, wide

Axes = tuple[str, ...]


def check_axes(params, axes: Axes) -> None:
    """ValueError outside of a map over `axes`, or with parameters sharded over them."""
    try:
        for name in axes:
            jax.lax.axis_size(name)
    except NameError as error:
        raise ValueError(
            f"microbatch(axis_name={said(axes)}): {error}. Call the step inside "
            "jax.shard_map (or vmap) over that axis, under a jax.jit round both; under "
            "jit alone sharded arrays need no axis_name"
        ) from None
    for path, x in jax.tree.leaves_with_path(params):
        if varying_axes(x) & {*axes}:
            raise ValueError(
                f"params{keystr(path)} varies over axis_name={said(axes)}: a step "
                "takes parameters that are replicated over it, in_specs P()"
            )


def said(axes: Axes) -> str:
    return repr(axes[0] if len(axes) == 1 else axes)


def total(tree, axes: Axes) -> Any:
    return jax.lax.psum(tree, axes) if axes else tree


def mean(tree, axes: Axes) -> Any:
    """In the dtypes of the leaves."""
    return jax.lax.pmean(tree, axes) if axes else tree


def any_of(flags, axes: Axes):
    """Whether a flag is set anywhere; None stays None."""
    if flags is None:
        return None
    here = flags.any()
    return jax.lax.pmax(here.astype(jnp.int32), axes) > 0 if axes else here


def own_key(key, axes: Axes):
    """A key of this device."""
    return jax.random.fold_in(key, jax.lax.axis_index(axes)) if axes else key


def one_of(model_state, before, taken, axes: Axes, reduce=jax.lax.pmean):
    """The model states of all devices as one, or the one before if none was taken."""
    if not axes:
        return model_state
    one = jax.tree.map(lambda x: _one(x, axes, reduce), model_state)
    return choose(taken, one, before)


def _one(x, axes: Axes, reduce):
    """By `reduce`; the largest of what is counted, and of keys, which are the same."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.lax.pmax(jax.random.key_data(x), axes)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return reduce(x.astype(wide(x.dtype)), axes).astype(x.dtype)
    return jax.lax.pmax(x, axes)
