"""What a step is made of, for each kind of argument that it takes.

A face's `run` takes as many arguments as the step does, in the same order, as pytrees
that `jax.jit` knows; it is what gets traced, donated and scheduled.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax


class Face(NamedTuple):
    """How a step is called.

    `state_in` and `state_out` find the optimizer's state in the arguments and the
    results of `run`; `take_apart` makes `run`'s arguments of the step's, `hand_back`
    the step's result of (the step's arguments, `run`'s result).
    """

    run: Callable
    donate: tuple[int, ...]
    state_in: Callable
    state_out: Callable
    take_apart: Callable = lambda *args: args
    hand_back: Callable = lambda args, out: out


def next_step(step, taken):
    """The count of updates, one on if there was one."""
    return step + 1 if taken is None else step + taken.astype(jax.typeof(step).dtype)
