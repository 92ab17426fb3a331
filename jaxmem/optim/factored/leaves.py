"""The leaves of a tree: their layer axes, the layout of their state, their dtype.

The leading axes of a leaf may count layers: a leaf [L, m, n] is L matrices. Everything
that mixes elements, a norm or a mean, is taken over the axes that follow, so that the
update of one layer needs the gradient of that layer alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from jaxmem._checks import shown
from jaxmem._paths import selection
from jaxmem.optim.accumulation.dtypes import accumulation_dtype


def layer_axes(who: str, stacked: Any, tree: PyTree) -> list[int]:
    """For each leaf how many of its leading axes count layers.

    Without `stacked` all axes but the last two; else one for each stacked leaf.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if stacked is None:
        return [max(0, x.ndim - 2) for _, x in leaves]
    stacks = selection(f"{who}: stacked", stacked, tree)
    for (path, x), stack in zip(leaves, stacks, strict=True):
        if stack and x.ndim == 0:
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"{who}: stacked: the leaf {name} is {shown(x)}: a stacked leaf has an "
                "axis 0, the layers"
            )
    return [int(stack) for stack in stacks]


def check_real(who: str, params: PyTree) -> None:
    """TypeError for a leaf that is no real floating array."""
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        dtype = getattr(x, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            name = jax.tree_util.keystr(path)
            raise TypeError(
                f"params{name} is {shown(x)}: {who} takes real floating arrays; leave "
                "others out with optax.masked or optax.partition"
            )


def map_leaves(
    who: str, count: int, fn: Callable, tree: PyTree, *others: PyTree
) -> list[PyTree]:
    """`count` trees of what `fn(path, leaf, *others)` gives, a tuple a leaf.

    The others have the structure of `tree`, and any subtree at its leaves. ValueError
    for one of another structure.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    try:
        columns = [structure.flatten_up_to(other) for other in others]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{who}: updates={shown(tree)}: not of the structure of the parameters "
            f"that the state was made for: {error}"
        ) from None
    rows = zip(leaves, *columns, strict=True)
    results = [fn(jax.tree_util.keystr(p), x, *rest) for (p, x), *rest in rows]
    return [structure.unflatten([r[i] for r in results]) for i in range(count)]


def check_shape(who: str, path: str, made: Sequence[int], got: Sequence[int]) -> None:
    """ValueError where the state of a leaf is not of the leaf's shape."""
    if tuple(made) != tuple(got):
        raise ValueError(
            f"{who}: the state of {path or 'the parameter'} has shape {tuple(made)}, "
            f"its gradient asks for {tuple(got)}: the state is that of other "
            "parameters, or of another `stacked`"
        )


def widened(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` on gradients and parameters in float32; updates are cast once."""
    tx = optax.with_extra_args_support(tx)
    wide = lambda tree: jax.tree.map(lambda x: x.astype(accumulation_dtype(x)), tree)

    def update(updates, state, params=None, **extra):
        new, state = tx.update(wide(updates), state, wide(params), **extra)
        return jax.tree.map(lambda u, g: u.astype(g.dtype), new, updates), state

    return optax.GradientTransformationExtraArgs(tx.init, update)
