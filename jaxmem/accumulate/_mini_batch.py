"""Is a state at the start of a mini-batch, and of this number of micro-batches?

AdamA's second moments depend on N, so a state must not change it halfway through a
training unnoticed, and a step must not begin in the middle of a mini-batch. Reading
that from a device would wait for the step before; so it is read of states that come
from elsewhere (fresh, restored), and not of those that the last call gave.
"""

from typing import Any

import jax
import jax.core
import numpy as np
import optax

from jaxmem.optim import AdamAState


def adama_states(opt_state: Any, calls: Any = None) -> list[tuple[AdamAState, Any]]:
    """Each with how many steps are in its mini-batch already, in a `MultiSteps`.

    None where there is none: a mini-batch is one step then.
    """
    kinds = AdamAState | optax.MultiStepsState
    found = []
    for x in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kinds)):
        if isinstance(x, AdamAState):
            found.append((x, calls))
        elif isinstance(x, optax.MultiStepsState):
            # optax's own accumulates itself, and hands on whole mini-batches
            own = None if jax.tree.leaves(x.acc_grads) else x.mini_step
            found += adama_states(x.inner_opt_state, own)
    return found


def counters(opt_state: Any) -> list[Any]:
    """The arrays that tell one state from another: a step makes each anew."""
    states = adama_states(opt_state)
    return [state.micro_step for state, _ in states if _has_values(state)]


def check_mini_batch(opt_state: Any, n: int, known: list[Any]) -> None:
    """ValueError for a state of another N, or in the middle of a mini-batch.

    States whose counters are among `known`, and those without values yet, pass.
    """
    for state, calls in adama_states(opt_state):
        if not any(state.micro_step is x for x in known) and _has_values(state):
            _check_values(state, n, calls)


def _has_values(state: AdamAState) -> bool:
    return not any(
        isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct) for x in state[:3]
    )


def _check_values(state: AdamAState, n: int, calls: Any) -> None:
    done, within, made_with = (
        int(np.asarray(x)) for x in (state.count, state.micro_step, state.micro_batches)
    )
    expected = 0 if calls is None else int(np.asarray(calls)) * n
    if within != expected:
        raise ValueError(
            f"the AdamA state is in the middle of a mini-batch: {within} micro-batches "
            f"are in it already (micro_step), {expected} are expected where a step of "
            f"n={n} begins"
        )
    other = made_with != n if calls is None else made_with % n  # k may vary
    if (done or within) and other:
        raise ValueError(
            f"n={n}, but the AdamA state comes from mini-batches of {made_with} "
            "micro-batches, on which its second moments depend; use that n, a new "
            "state, or, if the change is meant, the state with _replace(micro_batches="
            f"jnp.int32({n}))"
        )
