"""Optimizer states that accumulate the gradients of micro-batches.

A state class is registered, so that it is found anywhere inside the state of an optax
transformation, and so that its per-device fields are known.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jaxtyping import PyTree

_COUNTERS = ("count", "micro_step", "micro_batches")
_PER_DEVICE: dict[type, tuple[str, ...]] = {}  # state class -> its per-device fields

State = TypeVar("State", bound=type)


def accumulating_state(*per_device: str) -> Callable[[State], State]:
    """Registers a NamedTuple as the state of an optimizer that accumulates gradients.

    The class has three counters, int32[], beside its own fields: `count` of finished
    mini-batches, `micro_step`, the number of micro-batches in the current mini-batch (0
    between two mini-batches), and `micro_batches`, how many a mini-batch has.

    Args:
      *per_device: the fields that hold accumulated gradients. Under `jax.shard_map`
        each device has values of its own in them until the mini-batch ends.

    Returns:
      A class decorator.

    Raises:
      TypeError: the class lacks one of these fields.
    """

    def register(cls: State) -> State:
        fields = getattr(cls, "_fields", ())
        missing = [name for name in (*_COUNTERS, *per_device) if name not in fields]
        if missing:
            raise TypeError(
                f"accumulating_state: {cls.__name__} is no NamedTuple with the fields "
                f"{', '.join(missing)}"
            )
        _PER_DEVICE[cls] = per_device
        return cls

    return register


def is_accumulating(x: Any) -> bool:
    """Whether this is the state of an optimizer that accumulates gradients."""
    return type(x) in _PER_DEVICE


def accumulates(opt_state: PyTree) -> bool:
    """Whether a part of an optimizer's state accumulates gradients."""
    leaves = jax.tree.leaves(opt_state, is_leaf=is_accumulating)
    return any(map(is_accumulating, leaves))


def map_accumulating(fn: Callable, opt_state: PyTree, *others: PyTree) -> Any:
    """`fn` of each accumulating state; all else stays as it is in `opt_state`."""
    each = lambda s, *rest: fn(s, *rest) if is_accumulating(s) else s
    return jax.tree.map(each, opt_state, *others, is_leaf=is_accumulating)


def per_device_fields(state: Any) -> dict[str, PyTree]:
    """The fields of an accumulating state that differ between devices."""
    return {name: getattr(state, name) for name in _PER_DEVICE[type(state)]}


def map_per_device(fn: Callable[[PyTree], PyTree], state: Any) -> Any:
    """An accumulating state with `fn` of each of its per-device fields."""
    fields = per_device_fields(state)
    return state._replace(**{name: fn(tree) for name, tree in fields.items()})
