"""How low, and how the time is spent."""

import time

import numpy as np
import pytest

from benchmarks.layout import guillotine
from jaxmem import planning
from jaxmem.planning import Buffer
from jaxmem.planning.layout.fit import orders, simple_order
from jaxmem.planning.layout.problem import make_problem
from tests.planning.layouts import exponential, training_step


@pytest.mark.parametrize("seed", range(4))
def test_never_higher_than_best_fit(seed):
    """Not even without any time for more."""
    buffers = exponential(400, seed)
    simple = min(planning.best_fit(buffers, by).height for by in ("size", "lifetime"))
    for time_limit in (0, 0.1):
        assert planning.layout(buffers, time_limit=time_limit).height <= simple


@pytest.mark.slow
def test_fifty_thousand_are_never_higher_than_by_best_fit():
    buffers = exponential(50_000, 0)
    simple = min(planning.best_fit(buffers, by).height for by in ("size", "lifetime"))
    assert planning.layout(buffers).height <= simple


def test_the_order_of_size_comes_first_and_equal_ones_once():
    none = lambda problem: np.zeros(len(problem.size), bool)
    problem = make_problem(exponential(50, 1))
    found = list(orders(problem, none(problem)))
    assert np.array_equal(found[0], simple_order(problem, "size"))
    assert len({o.tobytes() for o in found}) == len(found) > 4
    # The longer, the larger: every order comes to the same.
    alike = make_problem([Buffer(k, 0, k + 1, k + 1) for k in range(20)])
    assert len(list(orders(alike, none(alike)))) == 1


@pytest.mark.slow
def test_time_that_one_stretch_leaves_goes_to_the_highest():
    """Three stretches of time: two are done at once, one is hard."""
    easy = [Buffer(f"e{k}", 10_000 + k, 10_002 + k, 5) for k in range(50)]
    late = [Buffer(f"l{k}", 20_000 + k, 20_002 + k, 5) for k in range(50)]
    hard = guillotine(600, 600, 10_000, 0)
    begin = time.monotonic()
    found = planning.layout([*easy, *hard, *late], time_limit=1.5)
    spent = time.monotonic() - begin
    assert not found.optimal  # else there was nothing to spend it on
    assert spent > 1.4
    alone = planning.layout(hard, time_limit=0)
    assert found.height < 0.95 * alone.height


@pytest.mark.parametrize("count", [1600, pytest.param(16_000, marks=pytest.mark.slow)])
def test_a_training_step_is_laid_out_almost_without_loss(count, monkeypatch):
    # Ten seconds of this process, whatever else the machine does.
    monkeypatch.setattr(time, "monotonic", time.process_time)
    buffers = training_step(count)
    simple = min(planning.best_fit(buffers, by).height for by in ("size", "lifetime"))
    found = planning.layout(buffers, time_limit=10)
    found.check()
    assert found.height < simple
    assert found.fragmentation < 0.0002
