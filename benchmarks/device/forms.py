"""Forms: attention's kernels for Hopper as they are, beside forms that were not taken.

Machine code says how many instructions a form takes, a device alone how they overlap.
The form in use is `as it is`; a faster one is a reason to change the defaults.
"""

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import jax.numpy as jnp

from benchmarks.device import fast, machine
from benchmarks.device.job import Job, NotHere, Rows
from benchmarks.device.right import refusal
from benchmarks.device.timing import in_turn
from benchmarks.steps.kernels import Case, Size, attention_case
from pallas_kernels.attention.gpu import case as gpu_case
from pallas_kernels.attention.gpu import grid, over_keys, pingpong, streams

SIZES = {
    "512": Size(tokens=512, heads=512, head=64),
    "2048": Size(tokens=2048, heads=64, head=64),
    "8192": Size(tokens=8192, heads=16, head=64),
    "8192, heads of 128": Size(tokens=8192, heads=8, head=128),
}
# A block of queries of two warpgroups; jax 0.10's simulator has no copies over an edge.
SMALL = Size(tokens=256, heads=1, head=64)
# (dropout's rate, causal).
RULES = {"bare": (0.0, False), "causal": (0.0, True), "dropout": (0.1, False)}

# Of each form the names that differ, by their module.
FORMS: dict[str, dict[Any, Any]] = {
    "as it is": {},
    "one warpgroup": {gpu_case: {"SHARED_FROM": sys.maxsize}},
    "no ping-pong": {over_keys: {"PingPong": lambda _: pingpong.PingPong()}},
    "a block a program": {
        streams: {"make_grid": lambda sizes, alike: grid.Grid(sizes)}
    },
    "many blocks a program": {
        streams: {"make_grid": lambda sizes, _: grid.make_grid(sizes, True)}
    },
    "tiles of 64 keys": {
        gpu_case: {"OF_TWO": gpu_case.TILES, "OF_TWO_SMALL": {}, "OF_TWO_BARE": {}}
    },
    "no tiles for bare programs": {gpu_case: {"OF_TWO_BARE": {}}},
}


def jobs() -> Iterator[Job]:
    for size in SIZES:
        for rule in RULES:
            yield Job(
                f"forms: attention, {size}, {rule}",
                partial(compared, size, rule),
                seconds=150,
                value=90,
            )


@contextlib.contextmanager
def form(name: str, small: bool):
    """A context in which the kernels are traced in a form."""
    lengths: dict[Any, Any] = {gpu_case: {"SHARED_FROM": 64}} if small else {}
    with contextlib.ExitStack() as stack:
        for changes in (lengths, FORMS[name]):
            for module, names in changes.items():
                stack.enter_context(mock.patch.multiple(module, **names))
        yield


def compared(size: str, rule: str, small: bool) -> Rows:
    """Milliseconds of each form and pass, in turn."""
    rate, causal = RULES[rule]
    sized = SMALL if small else SIZES[size]
    case = attention_case(rate, causal, sized, jnp.bfloat16)
    with machine.kernels_here():
        forms = {name: _passes(case, name, small) for name in FORMS}
        for which in ("forward", "backward"):
            chains = {name: passes[which] for name, passes in forms.items()}
            times_of = in_turn(chains, 1, 0) if small else in_turn(chains, fast.ROUNDS)
            for name, times in times_of.items():
                yield {"case": f"{size}, {rule}", "form": name, "pass": which, **times}


def _passes(case: Case, name: str, small: bool):
    """Of a form, traced and compiled."""
    with form(name, small):
        try:
            return fast.compiled(case, case.fn("pallas"), small)
        except (NotImplementedError, ValueError) as error:
            raise NotHere(refusal(error)) from error
