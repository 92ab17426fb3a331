"""The position of a state in its mini-batch, checked where a step begins.

An optimizer such as AdamA depends on the number of micro-batches, so a training must
not change it unnoticed, and a step must not begin in the middle of a mini-batch. To
read the counters of a state waits for the step that computes them. So they are read of
states from elsewhere (fresh or restored), and not of the state that the last call of a
step returned.
"""

from typing import Any

import jax
import jax.core
import numpy as np
import optax

from jaxmem.optim.accumulation.states import is_accumulating


def counters(opt_state: Any) -> list[Any]:
    """The arrays by which a state is recognized: each step makes new ones."""
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
