"""Parameters that their gradient overwrites: the state of Flax's fp8 layers.

The "gradient" of a scale or history in this collection of `flax.linen.fp8_ops` is its
new value. The collection goes from micro-batch to micro-batch, as batch statistics do:
n micro-batches fill as much of a history as n steps.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.tree_util import keystr

from jaxmem._checks import shown
from jaxmem.frameworks import OVERWRITE as KEY


def take_apart(params: Any) -> tuple[Any, Any]:
    """(what the optimizer updates, what gradients overwrite or None)."""
    if not (isinstance(params, Mapping) and KEY in params):
        _check_deeper(params)
        return params, None
    if set(params) != {"params", KEY}:
        raise ValueError(
            f"params with {KEY!r} have {shown(sorted(params))}: beside it they need "
            "'params', as Flax's TrainState has it, and nothing else (batch statistics "
            "are a model state, has_model_state=True)"
        )
    _check_deeper(params["params"])
    return params["params"], params[KEY]


def put_together(trained: Any, overwritten: Any, like: Any) -> Any:
    """Parameters as the loss function takes them, of the type of `like`."""
    if overwritten is None:
        return trained
    return type(like)({"params": trained, KEY: overwritten})


def _check_deeper(params: Any) -> None:
    """ValueError where an optimizer would take such parameters for ordinary ones."""
    for path, _ in jax.tree.leaves_with_path(params):
        if any(getattr(key, "key", None) == KEY for key in path):
            raise ValueError(
                f"params{keystr(path)}: {KEY!r} is taken at the root of the parameters "
                f"alone, as {{'params': ..., {KEY!r}: ...}}"
            )
