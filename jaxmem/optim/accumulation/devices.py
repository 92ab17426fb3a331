"""Trees that vary over mesh axes, which `jax.shard_map` tracks in their types.

If the micro-batches are spread over devices, each device accumulates its own gradients,
and one all-reduce at the end of the mini-batch combines them.
"""

import math
from typing import Any

import jax
from jaxtyping import PyTree

from jaxmem._compat import vary, varying_axes

AxisName = str | tuple[str, ...]


def count_devices(names: tuple[str, ...]) -> int:
    """How many devices the micro-batches are spread over; 1 without an axis."""
    try:
        return math.prod(jax.lax.axis_size(name) for name in names)
    except NameError as error:
        raise ValueError(
            f"axis_name={axis_text(names)}: {error}. An optimizer with an axis_name "
            "runs inside jax.shard_map (or vmap) over that axis; under jit with "
            "sharded arrays the gradients are reduced already: leave axis_name out"
        ) from None


def per_device(tree: PyTree, names: tuple[str, ...]) -> Any:
    """The same values, typed as varying over these axes; no data moves."""
    typed = _typed(names)
    return jax.tree.map(lambda x: vary(x, typed), tree)


def check_varying(grads: PyTree, accumulated: PyTree, names: tuple[str, ...]) -> None:
    """ValueError for what is the same on all devices, as far as types tell."""
    if same := _same_everywhere(grads, names):
        raise ValueError(
            f"the gradient {same[0]} does not vary over axis_name={axis_text(names)}: "
            "it is summed over its devices already, once a micro-batch. Take it with "
            "respect to the parameters that jaxmem.optim.start_step returns (map "
            "jaxmem.microbatch with check_vma=False), or leave axis_name out"
        )
    if _same_everywhere(accumulated, names):
        raise ValueError(
            f"the moments do not vary over axis_name={axis_text(names)}, but each "
            "device adds its own gradients to them: begin each mini-batch, before the "
            "scan over micro-batches, with jaxmem.optim.start_step, and end it with "
            "apply_step (not for MultiSteps, whose state would have to be per device "
            "between two calls: there, reduce the gradients yourself)"
        )


def check_replicated(tree: PyTree, names: tuple[str, ...]) -> None:
    """ValueError for what is not the same on all devices, as far as types tell."""
    varying = [path for path, x in _leaves(tree) if varying_axes(x) & {*names}]
    if varying:
        raise ValueError(
            f"{varying[0]} varies over axis_name={axis_text(names)} already: "
            "start_step takes what is replicated, once a mini-batch. The gradients of "
            "parameters sharded over an axis are reduced when they reach the shard: "
            "the optimizer needs no axis_name for those"
        )


def _same_everywhere(tree: PyTree, names: tuple[str, ...]) -> list[str]:
    typed = _typed(names)
    return [path for path, x in _leaves(tree) if typed and typed - varying_axes(x)]


def axis_text(names: tuple[str, ...]) -> str:
    """The axes as a user writes them."""
    return repr(names[0] if len(names) == 1 else names)


def _typed(names: tuple[str, ...]) -> frozenset[str]:
    """The axes that types track: none under check_vma=False, none of a vmap."""
    count_devices(names)  # raises where there is no such axis
    return frozenset(n for n in names if n in varying_axes(jax.lax.axis_index(n)))


def _leaves(tree: PyTree) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), x) for path, x in leaves]
