"""The model to evaluate in schedule-free training: the average of the weights."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr
from jaxtyping import PyTree

from jaxmem._checks import shown, wrong_type
from jaxmem.optim._memory_space import to_device
from jaxmem.optim.averaged.schedule_free import ScheduleFreeState
from jaxmem.optim.low_bit.codes import FORMATS, MomentCodes, shapes, types_of, unpack
from jaxmem.optim.low_bit.moments import is_leaf


def schedule_free_eval_params(state: Any, params: PyTree) -> Any:
    """`optax.contrib.schedule_free_eval_params`: the average x of `schedule_free`.

    Args:
      state: a `ScheduleFreeState`, or a state with one inside, such as that of an
        `optax.chain`.
      params: the parameters, y.

    Returns:
      `params - (1 - b1) (z - x)`, computed in float32, in the parameters' dtypes.

    Raises:
      TypeError: a state in which there is not one `ScheduleFreeState`.
      ValueError: a state of other parameters.

    Source:
      Defazio et al. (2024), arXiv 2405.15682.

    Example::

      tx = jaxmem.optim.schedule_free_adamw(3e-3)
      averaged = jaxmem.optim.schedule_free_eval_params(tx.init(params), params)
    """
    is_one = lambda x: isinstance(x, ScheduleFreeState)
    found = [x for x in jax.tree.leaves(state, is_leaf=is_one) if is_one(x)]
    if len(found) != 1:
        allowed = f"a state with one ScheduleFreeState in it, not {len(found)}"
        raise wrong_type("state", state, allowed)
    (one,) = found
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    kept = jax.tree.leaves(one.ahead, is_leaf=is_leaf)
    if len(kept) != len(leaves):
        raise ValueError(
            f"params={shown(params)}: {len(leaves)} leaves, the state has {len(kept)}: "
            "it was made for other parameters"
        )
    pairs = zip(leaves, kept, strict=True)
    return tree.unflatten([_average(path, p, d, one.b1) for (path, p), d in pairs])


def _average(path: Any, p: Any, d: Any, b1: Any) -> Any:
    ahead = _decoded(jax.tree.map(to_device, d), p.shape)
    if ahead is None:
        raise ValueError(
            f"state.ahead{keystr(path)}={shown(d)}: not of the parameter "
            f"{shown(p)}; the state was made for other parameters"
        )
    return (p.astype(jnp.float32) - (1 - b1) * ahead).astype(p.dtype)


def _decoded(d: Any, shape: tuple[int, ...]) -> Any:
    """z - x as numbers, by the one format of codes whose arrays are like these."""
    if not isinstance(d, MomentCodes):
        return d if d.shape == shape else None
    blocks = d.scale.shape[-1]
    for fmt, _, _ in FORMATS.values():
        expected = shapes(fmt, shape[-1] // blocks, shape) if shape else d
        if types_of(expected) == types_of(d):
            return unpack(fmt, d)
    return None
