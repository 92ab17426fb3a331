"""Chains: never dearer than the dynamic program that is known for them."""

import numpy as np
import pytest

from jaxmem import planning
from tests.planning.chains import persistent, random_chain

flops = lambda operation: operation.flops


def compared(chain, effort):
    """(bytes as a part of the peak, cost of the frontier, of the dynamic program)."""
    options = dict(order="program", cost=flops, effort=effort)
    found = planning.frontier(chain.graph(), **options)
    known, peak = persistent(chain), planning.peak(chain.graph())
    for part in (0.1, 0.125, 0.15, 0.175, 0.2, 0.3, 0.5):
        budget = int(part * peak)
        if np.isfinite(known[budget]):
            yield part, found.at(budget).cost, known[budget]
    assert found.peaks[0] <= np.flatnonzero(np.isfinite(known))[0]


@pytest.mark.parametrize(
    "count, inner, seed",
    [pytest.param(40, 30, 0, marks=pytest.mark.slow), (20, 4, 1)],
)
def test_no_chain_costs_more_than_by_dynamic_programming(count, inner, seed):
    rows = list(compared(random_chain(count, seed, inner), effort=0.0))
    assert len(rows) >= 2
    for part, cost, known in rows:
        assert cost <= known * (1 + 1e-9), part
    # What crosses the end of a run need not be made a second time by its last stage.
    assert any(cost < known * 0.99 for _, cost, known in rows)


@pytest.mark.slow
@pytest.mark.parametrize("count", [40, 60])
@pytest.mark.parametrize("inner", [0, 10, 30])
@pytest.mark.parametrize("seed", range(2))
def test_nor_do_many_with_the_search_on_top(count, inner, seed):
    rows = list(compared(random_chain(count, seed, inner), effort=0.3))
    for part, cost, known in rows:
        assert cost <= known * (1 + 1e-9), part
