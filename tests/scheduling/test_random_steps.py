"""Whole steps drawn at random are what they were, and compiled take no more.

No target is named, so no compiler is asked before: where a step keeps a few KiB less
between its passes, the compiler's order within one layer may hold one more of that
layer's arrays at once. That much is allowed; with a target nothing is.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxmem import schedule
from jaxmem.scheduling import BudgetError
from tests.scheduling.problem import assert_close, copy
from tests.scheduling.random_steps import Drawn, drawn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("x64", "standard_jax"),
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
]

SEEDS = range(12)
STEPS = 3


@functools.cache
def step_of(seed: int) -> Drawn:
    return drawn(seed)


def rtol(step: Drawn) -> float:
    """Sums of at most 96 terms, and a division by the root of a second moment (1e3)."""
    return STEPS * 96 * 1e3 * float(jnp.finfo(step.dtype).eps) / 2


def run(compiled, args):
    """The state and what was reported, after some steps on the same batch."""
    params, state, x = copy(args)
    reports = []
    for _ in range(STEPS):
        params, state, report = compiled(params, state, x)
        reports.append(copy(report))
    return params, state, reports


def peak(compiled) -> int:
    found = compiled.memory_analysis()
    both = found.argument_size_in_bytes + found.output_size_in_bytes
    return both + found.temp_size_in_bytes - found.alias_size_in_bytes


def array_of_a_layer(step: Drawn) -> int:
    """Bytes of one layer's largest array, in the dtype that it is computed in."""
    rows, width = step.args[2].shape
    return max(rows, width) * width * jnp.dtype(step.dtype).itemsize


@pytest.mark.parametrize("donate", [(), (0, 1)], ids=["undonated", "donated"])
@pytest.mark.parametrize("seed", SEEDS)
def test_values_and_bytes(seed, donate):
    step = step_of(seed)
    plain = jax.jit(step.step, donate_argnums=donate).lower(*step.args).compile()
    made = schedule(step.step, donate_argnums=donate).lower(*step.args).compile()
    assert_close(run(made, step.args), run(plain, step.args), rtol(step))
    assert peak(made) <= peak(plain) + array_of_a_layer(step), step.words


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_a_target_and_a_budget(seed):
    """What fits has the same values; what does not says the least, which is more."""
    step = step_of(seed)
    made = schedule(step.step, donate_argnums=(0, 1), target="cpu", progress=False)
    plan = made.plan(*step.args)
    assert plan.scheduled.peak_bytes <= plan.plain.peak_bytes
    budget = int(0.97 * plan.scheduled.peak_bytes)
    how = {"donate_argnums": (0, 1), "target": "cpu", "progress": False}
    tight = schedule(step.step, budget, **how)
    try:
        assert tight.plan(*step.args).scheduled.peak_bytes <= budget
    except BudgetError as error:
        assert error.least > budget
        tight = made
    want = run(jax.jit(step.step), step.args)
    assert_close(run(tight, step.args), want, rtol(step))
