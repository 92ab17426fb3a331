"""The step's form for one kind of arguments, such as a TrainState."""

from collections.abc import Callable
from typing import NamedTuple

import jax


class Adapter(NamedTuple):
    """How a step is called for one kind of arguments."""

    # the step, of the user's own arguments; it is traced, donated and scheduled
    run: Callable
    donate: tuple[int, ...]  # the positions of the arguments that it replaces
    # `(args) -> opt_state`, where a step finds the optimizer's state
    state_in: Callable
    state_out: Callable  # `(args, out) -> opt_state`, where it is after a call
    check: Callable = lambda args: None  # raises for arguments of the wrong kind


def next_step(step, updated):
    """The number of updates, which grows by one if there was an update."""
    if updated is None:
        return step + 1
    return step + updated.astype(jax.typeof(step).dtype)
