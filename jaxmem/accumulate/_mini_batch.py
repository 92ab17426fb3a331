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

from jaxmem.optim import AdamAState


def adama_states(opt_state: Any) -> list[AdamAState]:
    is_adama = lambda x: isinstance(x, AdamAState)
    leaves = jax.tree.leaves(opt_state, is_leaf=is_adama)
    return [x for x in leaves if is_adama(x)]


def counters(opt_state: Any) -> list[Any]:
    """The arrays that tell one state from another: a step makes each anew."""
    states = adama_states(opt_state)
    return [state.micro_step for state in states if _has_values(state)]


def check_mini_batch(opt_state: Any, n: int, known: list[Any]) -> None:
    """ValueError for a state of another N, or in the middle of a mini-batch.

    States whose counters are among `known`, and those without values yet, pass.
    """
    for state in adama_states(opt_state):
        if not any(state.micro_step is x for x in known) and _has_values(state):
            _check_values(state, n)


def _has_values(state: AdamAState) -> bool:
    return not any(
        isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct) for x in state[:3]
    )


def _check_values(state: AdamAState, n: int) -> None:
    done, within, made_with = (
        int(np.asarray(x)) for x in (state.count, state.micro_step, state.micro_batches)
    )
    if within:
        raise ValueError(
            f"the AdamA state is in the middle of a mini-batch: {within} micro-batches "
            "are in it already (micro_step), and a step takes in a whole mini-batch"
        )
    if done and made_with != n:
        raise ValueError(
            f"n={n}, but the AdamA state comes from mini-batches of {made_with} "
            "micro-batches, on which its second moments depend; use that n, a new "
            "state, or, if the change is meant, the state with _replace(micro_batches="
            f"jnp.int32({n}))"
        )
