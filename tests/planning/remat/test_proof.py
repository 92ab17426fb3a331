"""The optimum under a budget: what is called proven is, over all orders and repeats."""

import random
from dataclasses import replace

import numpy as np
import pytest

from jaxmem import planning
from jaxmem.planning import Graph, Operation, Value, sequence_profile
from jaxmem.planning.remat import proof
from jaxmem.planning.remat.exhaustive import ExhaustiveResult, search_all
from jaxmem.planning.remat.integer_program import rounded
from jaxmem.planning.remat.sequence import SequenceTables
from tests.planning.brute import cheapest
from tests.planning.chains import layered
from tests.planning.graphs import randomly

flops = lambda operation: operation.flops


def small_graph(seed):
    """Up to six operations with all that they may have, but for aliases."""
    chance = random.Random(seed)
    graph = randomly(seed, chance.randint(2, 6), near=4, plain=chance.random() < 0.4)
    operations = tuple(
        replace(
            o, flops=float(chance.randint(1, 9)), recomputable=chance.random() < 0.8
        )
        for o in graph.operations
    )
    return replace(graph, aliases={}, operations=operations)


def budgets(graph):
    peak = planning.peak(graph)
    some = {peak - 1, int(0.8 * peak), int(0.65 * peak), int(0.5 * peak)}
    return sorted(budget for budget in some if budget >= 0)


@pytest.mark.parametrize("seeds", [range(0, 30), range(100, 130)])
def test_optimal_is_the_cheapest_of_all_orders(seeds):
    dearer = 0
    for graph in map(small_graph, seeds):
        for budget in budgets(graph):
            least = cheapest(graph, budget)
            exact = dict(cost=flops, exact=True, effort=0.01)
            if np.isinf(least):
                with pytest.raises(planning.OutOfReach, match="no sequence stays") as e:
                    planning.rematerialise(graph, budget, **exact)
                assert e.value.proven
                continue
            plan = planning.rematerialise(graph, budget, **exact)
            assert plan.optimal and plan.optimal_in_order
            assert plan.cost == least
            assert max(sequence_profile(graph, plan.sequence)) == plan.peak <= budget
            first = list(dict.fromkeys(plan.sequence))
            dearer += first != sorted(first)
    assert dearer  # some of these need another order than the program's


@pytest.mark.slow
def test_optimal_is_the_cheapest_of_all_orders_of_many():
    test_optimal_is_the_cheapest_of_all_orders(range(1000, 1400))


OVER = Graph(
    (
        Operation("make", (), (0,), flops=1.0),
        Operation("wide", (0,), (1,), flops=3.0),
        Operation("over", (0,), (2,), 4, ((2, 0),), flops=1.0),
        Operation("grow", (2,), (3,), flops=1.0),
        Operation("join", (1, 3), (4,), flops=1.0),
    ),
    tuple(Value(b) for b in (8, 8, 8, 2, 1)),
    arguments=(),
    outputs=(4,),
)


@pytest.mark.parametrize("budget, cost", [(20, 0.0), (19, 1.0), (18, 1.0)])
def test_a_cheaper_plan_in_another_order_is_found(budget, cost):
    """As it is written, `make` and `wide` are repeated for 4; `grow` first, `make`."""
    plan = planning.rematerialise(OVER, budget, cost=flops, exact=True, effort=0)
    assert plan.optimal and plan.cost == cost == cheapest(OVER, budget)
    assert max(sequence_profile(OVER, plan.sequence)) == plan.peak <= budget


def without_exhaustive(monkeypatch):
    gave_up = lambda *args, **options: ExhaustiveResult(None, False)
    monkeypatch.setattr(proof, "search_all", gave_up)


def test_where_only_an_order_was_searched_it_says_so(monkeypatch):
    graph = layered([(3, 2.0), (1, 5.0), (4, 1.0), (2, 3.0), (5, 2.0)])
    budget = int(0.8 * planning.peak(graph))
    options = dict(cost=flops, exact=True, effort=0, time_limit=30)
    everywhere = planning.rematerialise(graph, budget, **options)
    without_exhaustive(monkeypatch)
    plan = planning.rematerialise(graph, budget, **options)
    assert everywhere.optimal and not plan.optimal
    assert plan.optimal_in_order
    assert plan.cost == everywhere.cost > 0
    assert max(sequence_profile(graph, plan.sequence)) <= budget


def test_where_only_an_order_was_searched_there_may_be_more(monkeypatch):
    options = dict(cost=flops, exact=True, effort=0, time_limit=30)
    with pytest.raises(planning.OutOfReach, match="no sequence stays") as error:
        planning.rematerialise(OVER, 17, **options)
    assert error.value.proven and np.isinf(cheapest(OVER, 17))
    without_exhaustive(monkeypatch)
    with pytest.raises(planning.OutOfReach, match="none was found") as error:
        planning.rematerialise(OVER, 17, **options)
    assert not error.value.proven


def test_the_search_without_exact_claims_nothing():
    graph = layered([(3, 2.0), (1, 5.0), (4, 1.0)])
    plan = planning.rematerialise(graph, planning.peak(graph) - 1, cost=flops)
    assert plan.cost > 0 and not plan.optimal and not plan.optimal_in_order
    free = planning.rematerialise(graph, planning.peak(graph), cost=flops)
    assert free.cost == 0 and free.optimal


def test_a_search_that_is_cut_short_claims_nothing():
    graph = layered([(1, 1.0)] * 8)
    tables, cost = SequenceTables(graph), np.array([o.flops for o in graph.operations])
    found = search_all(tables, cost, planning.peak(graph) - 1, states=20)
    assert found == ExhaustiveResult(None, False)


def test_rounding_the_relaxation_gives_sound_sequences():
    graph = layered([(3, 2.0), (1, 5.0), (4, 1.0), (2, 3.0), (5, 2.0)])
    cost = np.array([o.flops for o in graph.operations])
    budget = 0.8 * planning.peak(graph)
    found = rounded(SequenceTables(graph), cost, budget, 30.0)
    peaks = [max(sequence_profile(graph, s.tolist())) for s in found]
    assert min(peaks) < planning.peak(graph)
