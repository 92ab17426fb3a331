"""Optimizer states that accumulate the gradients of micro-batches, and where they are.

A state class is registered, so that it is found anywhere inside the state of an optax
transformation. A step must not change the number of micro-batches unnoticed, nor begin
in the middle of a mini-batch: AdamA's values depend on both.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.core
import numpy as np
import optax
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


def counters(opt_state: Any) -> list[Any]:
    """The arrays by which a state is recognized: each step makes new ones."""
    # To read counters waits for the step that computes them, so they are not read of
    # the state that the last call of a step returned.
    return [s.micro_step for s, _ in _accumulating(opt_state) if _has_values(s)]


def check_position(opt_state: Any, n: int, known: list[Any]) -> None:
    """ValueError for a state of another n, or in the middle of a mini-batch.

    States whose counters are among `known`, and those without values yet, pass.
    """
    for state, steps in _accumulating(opt_state):
        if not any(state.micro_step is x for x in known) and _has_values(state):
            _check_values(state, n, steps)


def _accumulating(opt_state: Any, steps: Any = None) -> list[tuple[Any, Any]]:
    """(state, steps) of each accumulating state, with the steps in its mini-batch."""
    # The steps are those that a `MultiSteps` around it has counted, or None where a
    # mini-batch is one step.
    is_multi = lambda x: isinstance(x, optax.MultiStepsState)
    is_leaf = lambda x: is_accumulating(x) or is_multi(x)
    states = []
    for x in jax.tree.leaves(opt_state, is_leaf=is_leaf):
        if is_accumulating(x):
            states.append((x, steps))
        elif is_multi(x):
            # optax's own MultiSteps accumulates itself, and passes whole mini-batches
            inner = None if jax.tree.leaves(x.acc_grads) else x.mini_step
            states += _accumulating(x.inner_opt_state, inner)
    return states


def _counters_of(state: Any) -> tuple[Any, Any, Any]:
    return state.count, state.micro_step, state.micro_batches


def _has_values(state: Any) -> bool:
    abstract = jax.core.Tracer | jax.ShapeDtypeStruct
    return not any(isinstance(x, abstract) for x in _counters_of(state))


def _check_values(state: Any, n: int, steps: Any) -> None:
    count, within, before = (int(np.asarray(x)) for x in _counters_of(state))
    expected = 0 if steps is None else int(np.asarray(steps)) * n
    name = type(state).__name__
    if within != expected:
        raise ValueError(
            f"the {name} is in the middle of a mini-batch: {within} micro-batches "
            f"are in it already (micro_step), {expected} are expected where a step of "
            f"n={n} begins"
        )
    other = before != n if steps is None else before % n  # k of a MultiSteps may vary
    if (count or within) and other:
        raise ValueError(
            f"n={n}, but the {name} comes from mini-batches of {before} micro-batches, "
            "on which its values depend; use that n, a new state, or, if the change is "
            f"meant, the state with _replace(micro_batches=jnp.int32({n}))"
        )
