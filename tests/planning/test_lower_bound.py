"""PeakBounds: never above the optimum, each at least the one before it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.planning import Graph, Operation, Value, lower_bound, peak, profile
from jaxmem.planning._live_ranges import order_problem
from jaxmem.planning._lower_bound import LARGEST, PeakBounds
from tests.planning import brute, graphs


def test_working_set():
    assert lower_bound(graphs.chain(3, 5, 2)) == 8
    assert lower_bound(Graph((), ())) == 0


def test_what_must_be_kept():
    """While the second is done, the first's value waits for the last."""
    made = graphs.Builder()
    a = made.do("a", (), 10)
    b = made.do("b", (), 6)
    c = made.do("c", (made.do("d", (a, b), 2),), 8)
    made.output(made.do("e", (c, a), 1))
    graph = made.graph()
    assert lower_bound(graph, cuts=0) == 10 + 2 + 8
    assert brute.least(graph) == 20


def cuts() -> Graph:
    """x is made before or after y; either way one of its sides is there meanwhile."""
    made = graphs.Builder()
    a = made.do("a", (), 10)
    made.output(made.do("x", (a,), 7))
    made.output(made.do("y", (), 20))
    return made.graph()


def test_a_minimum_cut_sees_what_could_be_done_by_then():
    """Before y come: nothing, or a, or a and x. Its own bytes count in any case."""
    graph = cuts()
    bounds = PeakBounds(order_problem(graph))
    assert [int(b) for b in bounds.necessary] == [10, 17, 20]
    assert [bounds.cut(i) for i in range(3)] == [10, 17, 20]
    assert lower_bound(graph) == 27  # all outputs, at the end


def test_a_cut_above_what_is_necessary():
    """While u runs x has been done or not: its value is there, or the larger it reads.

    Neither is necessary, but the smaller of them is.
    """
    made = graphs.Builder()
    y = made.do("y", (), 6)
    u = made.do("u", (made.do("z", (y,), 1),), 9)
    made.output(made.do("end", (u, made.do("x", (y,), 4)), 1))
    graph = made.graph()
    bounds = PeakBounds(order_problem(graph))
    assert (bounds.necessary[2], bounds.cut(2)) == (10, 14)
    assert lower_bound(graph) == brute.least(graph) == 14
    assert lower_bound(graph, cuts=0) == 13 + 1


def least_during(graph: Graph) -> list[int]:
    """For each operation the fewest bytes alive while it runs, in any order."""
    least = [2**60] * len(graph.operations)
    for order in brute.orders(graph):
        for i, found in zip(order, profile(graph, order), strict=True):
            least[i] = min(least[i], found)
    return least


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_never_above_the_optimum(seed, n):
    graph = graphs.randomly(seed, n)
    bounds = PeakBounds(order_problem(graph))
    assert bounds.largest(0) <= bounds.largest(n) <= brute.least(graph)
    for i, least in enumerate(least_during(graph)):
        assert bounds.necessary[i] <= bounds.cut(i) <= least


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_a_cut_is_exact_for_one_operation(seed, n):
    graph = graphs.randomly(seed, n, plain=True)
    bounds = PeakBounds(order_problem(graph))
    assert [bounds.cut(i) for i in range(n)] == least_during(graph)


def test_more_bytes_than_32_bits():
    """The cut is counted in units; what does not divide is rounded down."""
    for unit in (2**40, 2**40 + 1, LARGEST):
        large, small = graphs.training(1, width=8), graphs.training(1, width=8)
        large = Graph(
            large.operations,
            tuple(Value(v.bytes * unit) for v in large.values),
            large.arguments,
            large.outputs,
            large.aliases,
        )
        assert lower_bound(large) == unit * lower_bound(small)
    odd = [Value(v.bytes * 2**40 + k) for k, v in enumerate(small.values)]
    odd = Graph(
        small.operations, tuple(odd), small.arguments, small.outputs, small.aliases
    )
    assert 0.999 * 2**40 * lower_bound(small) < lower_bound(odd) <= peak(odd)


@pytest.mark.parametrize("candidates", [(0,), (0, 1)])
def test_written_over(candidates):
    made = graphs.Builder()
    ins = [made.do("a", (), 8), made.do("b", (), 8)]
    made.output(made.do("+", ins, 8, over=[ins[k] for k in candidates]))
    assert lower_bound(made.graph()) == brute.least(made.graph()) == 16


def test_scratch():
    graph = Graph((Operation("loop", (), (0,), scratch=100),), (Value(4),))
    assert lower_bound(graph) == 104
