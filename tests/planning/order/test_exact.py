"""The exact search: the optimum, proven, forward and backward."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.planning import (
    Graph,
    Operation,
    Value,
    best_greedy,
    lower_bound,
    peak,
    profile,
)
from jaxmem.planning._live_ranges import LiveWalk, order_problem
from jaxmem.planning.order import exact
from jaxmem.planning.order.exact import SolutionCache, search, solve
from tests.planning import brute, graphs


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7))
def test_finds_the_optimum_from_any_bound(seed, n):
    graph = graphs.randomly(seed, n)
    problem, least = order_problem(graph), brute.least(graph)
    for bound in (0, least):
        found = solve(problem, range(n), bound)
        assert found.peak == found.bound == least == peak(graph, found.order)
        graph.check_order(found.order)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7))
def test_both_ways_say_whether_there_is_an_order(seed, n):
    graph = graphs.randomly(seed, n)
    least = brute.least(graph)
    for problem in (order_problem(graph), order_problem(graph).reversed):
        found = search(problem, least)
        assert problem.peak(found.order) <= least
        none = search(problem, least - 1)
        assert none.order is None and none.complete and none.next <= least


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30))
def test_backward_in_time_has_the_same_bytes(seed, n):
    graph = graphs.randomly(seed, n)
    problem, order = order_problem(graph), best_greedy(graph)
    walk = brute.ValueWalk(graph)
    assert profile(graph, order) == [walk.do(i) for i in order]
    backward = problem.reversed.profile(order[::-1])
    assert backward[::-1] == profile(graph, order)
    assert problem.reversed.final == problem.base == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 30), st.data())
def test_a_part_has_the_bytes_of_the_whole(seed, n, data):
    graph = graphs.randomly(seed, n)
    problem, order = order_problem(graph), best_greedy(graph)
    a = data.draw(st.integers(0, n - 1))
    b = data.draw(st.integers(a + 1, n))
    walk = LiveWalk(problem)
    before = [walk.do(i) for i in order[:a]]
    live = walk.live
    part = walk.rest(order[a:b])
    assert before + part.profile(range(b - a)) == problem.profile(order)[:b]
    for i in reversed(order[:a]):
        walk.undo(i)
    assert (walk.live, part.base) == (0, live)


@pytest.mark.fast("True-4-2", "True-40-3", "False-10-2", "False-40-1")
@pytest.mark.parametrize("near, reads", [(4, 2), (10, 2), (40, 1), (40, 3)])
@pytest.mark.parametrize("plain", [True, False])
def test_forty_operations(near, reads, plain):
    """To the optimum; nothing is found with a byte less, in either direction."""
    graph = graphs.randomly(0, 40, near, reads, 100, plain)
    problem = order_problem(graph)
    found = solve(problem, best_greedy(graph), 0)
    assert found.peak == found.bound == peak(graph, found.order)
    for direction in (problem, problem.reversed):
        assert search(direction, found.peak - 1, sets=100_000).order is None


def independent(n: int, alike: bool) -> Graph:
    """Operations that need nothing and whose values stay: 2**n sets."""
    sizes = [1 if alike else k + 1 for k in range(n)]
    scratch = [5 if alike else 3 * n - 2 * k for k in range(n)]
    operations = [Operation(str(k), (), (k,), scratch[k]) for k in range(n)]
    return Graph(tuple(operations), tuple(map(Value, sizes)), (), tuple(range(n)))


@pytest.mark.parametrize("n", [64, 65, 200])
def test_equal_operations(n):
    """What can change places is done in one order; sets of one word and of several."""
    problem = order_problem(independent(n, alike=True))
    found = search(problem, n + 4)
    assert found.order is None and found.complete and found.sets <= n
    assert found.next == n + 5
    assert search(problem, n + 5).order == tuple(range(n))


@pytest.mark.slow
def test_more_operations_than_a_word_has_bits():
    graph = graphs.randomly(0, 80, near=4, large=100)
    problem = order_problem(graph)
    found = solve(problem, best_greedy(graph), lower_bound(graph))
    graph.check_order(found.order)
    assert found.peak == found.bound == peak(graph, found.order)
    assert search(problem.reversed, found.peak - 1, sets=5_000).order is None


def test_one_way_narrow_the_other_wide(monkeypatch):
    """Forward any set may come first; backward what fits in the end goes there."""
    sizes = []

    def counted(problem, limit, *, sets, until):
        sizes.append(sets)
        return search(problem, limit, sets=sets, until=until)

    monkeypatch.setattr(exact, "search", counted)
    graph = independent(40, alike=False)
    found = solve(order_problem(graph), range(40), 0)
    assert found.peak == found.bound == peak(graph, found.order)
    # The other direction is tried before either is given more sets.
    assert {*sizes} == {exact.SIZES[0]}


def test_a_search_that_is_cut_short_proves_nothing():
    graph = graphs.randomly(1, 40, 40, 2, 100, plain=True)
    problem = order_problem(graph)
    best = solve(problem, best_greedy(graph), 0)
    for cut in (
        search(problem, best.peak - 1, sets=50),
        search(problem, best.peak - 1, width=5),
        search(problem, best.peak - 1, until=time.monotonic()),
    ):
        assert cut.order is None and not cut.complete
    late = solve(problem, range(40), 0, until=time.monotonic())
    assert (late.order, late.bound) == (tuple(range(40)), 0)
    assert late.peak == peak(graph)


@pytest.mark.slow
def test_a_beam_finds_what_it_can():
    """Where no search comes to an end; then nothing is proven."""
    graph = graphs.randomly(4, 60, 60, 2, 100, plain=True)
    problem, greedy = order_problem(graph), best_greedy(graph)
    found = solve(problem, greedy, lower_bound(graph), sizes=(50,))
    graph.check_order(found.order)
    assert found.bound < found.peak == peak(graph, found.order) < peak(graph, greedy)


def test_layers_are_solved_once(monkeypatch):
    """The same stretch above other bytes is not searched again, unless for more."""
    problem, calls = order_problem(graphs.randomly(5, 20, large=100)), []
    monkeypatch.setattr(
        exact,
        "solve",
        lambda *a, **k: calls.append(a) or solve(*a, **k),
    )
    once, far = SolutionCache(), np.inf
    least = once.solve(problem, range(20), 0, far, (10**6,))
    higher = type(problem)(
        problem.before,
        problem.after,
        problem.ranges,
        problem.scratch,
        problem.overwrites,
        base=1000,
    )
    repeated = once.solve(higher, range(20), 1000, far, (10**6,))
    assert len(calls) == 1
    once.solve(higher, range(20), 1500, far, (10**6,))
    assert len(calls) == 1
    assert repeated.order == least.order
    assert (repeated.peak, repeated.bound) == (least.peak + 1000, least.bound + 1000)


def test_what_was_good_enough_is_solved_again_for_less():
    graph = graphs.randomly(5, 20, large=100)
    problem, once, far = order_problem(graph), SolutionCache(), np.inf
    least = solve(problem, range(20), 0).peak
    start = peak(graph)
    assert least < start
    found = once.solve(problem, range(20), start, far, (10**6,))
    assert found.peak == start
    assert once.solve(problem, range(20), 0, far, (10**6,)).peak == least
