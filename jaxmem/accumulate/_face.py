"""What a step is made of, for each kind of argument that it takes.

A face's `run` takes the step's own arguments; it is what gets traced, donated and
scheduled.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax


class Face(NamedTuple):
    """How a step is called.

    `state_in(args)` and `state_out(args, out)` find the optimizer's state in the
    step's arguments and, after a call, in those and its results. `check(args)` raises
    for arguments of the wrong kind.
    """

    run: Callable
    donate: tuple[int, ...]
    state_in: Callable
    state_out: Callable
    check: Callable = lambda args: None


def next_step(step, taken):
    """The count of updates, one on if there was one."""
    return step + 1 if taken is None else step + taken.astype(jax.typeof(step).dtype)
