"""The order of first times: searched for, the program's, or one that is given."""

from dataclasses import replace

import pytest

from jaxmem import planning
from jaxmem.planning import Graph
from tests.planning.graphs import Builder

flops = lambda operation: operation.flops


def fan(count: int) -> Graph:
    """Wide values that are all made before the first is read, as it is written."""
    made = Builder()
    x = made.argument(8)
    wide = [made.do("wide", (x,), 1000) for _ in range(count)]
    made.output(made.do("sum", [made.do("narrow", (w,), 10) for w in wide], 10))
    graph = made.graph()
    costly = tuple(replace(o, flops=1.0) for o in graph.operations)
    return replace(graph, operations=costly)


def test_the_frontier_searches_for_the_order():
    graph = fan(12)
    best = planning.order(graph)
    assert 5 * best.peak < planning.peak(graph)
    found = planning.frontier(graph, cost=flops, effort=0.01)
    assert (found.peaks, found.costs) == ((best.peak,), (0.0,))
    assert max(planning.sequence_profile(graph, found.sequences[0])) == best.peak
    plan = planning.rematerialise(graph, best.peak, cost=flops, effort=0.01)
    assert plan.recomputed == () and plan.peak == best.peak


def test_the_program_s_order_is_kept_on_request():
    graph = fan(6)
    found = planning.frontier(graph, order="program", cost=flops, effort=0.01)
    assert found.peaks[-1] == planning.peak(graph)
    for sequence in found.sequences:
        first = list(dict.fromkeys(sequence.tolist()))
        assert first == sorted(first)


def test_an_order_that_is_given_is_kept():
    graph = fan(6)
    given = planning.post_order(graph)
    found = planning.frontier(graph, order=given, cost=flops, effort=0.01)
    assert found.peaks[-1] == planning.peak(graph, given) < planning.peak(graph)
    for sequence in found.sequences:
        assert tuple(dict.fromkeys(sequence.tolist())) == given
    budgets = [found.peaks[0], graph.bytes_of(range(len(graph.values)))]
    plans = [found.at(budget) for budget in budgets]
    assert [p.peak for p in plans] == [found.peaks[0], found.peaks[-1]]


@pytest.mark.parametrize(
    "order, message",
    [
        ("backwards", "order='backwards': 'search', 'program' or every operation once"),
        ((0, 1), "order: must have every operation once"),
        ((2, 3, 0, 1, 4), "order: operation 2 comes before 0"),
    ],
)
def test_an_order_that_is_none_is_refused(order, message):
    graph = fan(2)
    with pytest.raises(ValueError, match=message):
        planning.frontier(graph, order=order)
    with pytest.raises(ValueError, match=message):
        planning.rematerialise(graph, 10_000, order=order, exact=True)
