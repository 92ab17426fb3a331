"""Orders of whole graphs: never worse than greedy, and how near to the bound."""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.planning import Graph, best_greedy, lower_bound, order, peak
from jaxmem.planning._live_ranges import order_problem
from jaxmem.planning.order import exact
from jaxmem.planning.order import search as order_search
from jaxmem.planning.order.search import segment_ranges
from jaxmem.planning.order.sweep import sweep, swept
from tests.planning import brute, graphs
from tests.sets import some_fast


def test_comment_of_the_list_scheduler():
    """Greedy 6, best 5; and 5 too with the sizes as they are drawn."""
    graph = graphs.seven(**graphs.COMMENT)
    found = order(graph)
    assert (found.peak, found.optimal) == (5, True) == (brute.least(graph), True)
    drawn = order(graphs.seven(**graphs.COMMENT | {"B": 2}))
    assert (drawn.peak, drawn.optimal) == (5, True)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 7))
def test_small_graphs_are_solved(seed, n):
    graph = graphs.randomly(seed, n)
    found = order(graph)
    graph.check_order(found.operations)
    assert found.optimal and found.gap == 0
    assert found.peak == peak(graph, found.operations) == brute.least(graph)
    assert (found.exact, found.searched) == (found.segments, 0)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(20, 80))
def test_never_worse_than_greedy_nor_below_the_bound(seed, n):
    graph = graphs.randomly(seed, n, near=6)
    found = order(graph, time_limit=1)
    graph.check_order(found.operations)
    assert (
        found.peak == peak(graph, found.operations) <= peak(graph, best_greedy(graph))
    )
    assert lower_bound(graph) <= found.peak and found.lower_bound <= found.peak
    assert found.gap == pytest.approx(found.peak / found.lower_bound - 1)


@pytest.mark.parametrize("clipped", some_fast([False, True], False))
@pytest.mark.parametrize("width, tokens", [(64, 256), (64, 64), (128, 32)])
def test_training(width, tokens, clipped):
    """Far below program order where weights are large, and near the proven bound."""
    graph = graphs.training(12, width, tokens, clipped)
    found = order(graph)
    graph.check_order(found.operations)
    greedy = peak(graph, best_greedy(graph))
    assert found.peak == peak(graph, found.operations) <= greedy
    assert found.gap < 0.01
    if tokens < width:
        assert clipped or found.peak < 0.68 * peak(graph)


def test_updates_are_not_put_off_where_that_costs_nothing():
    """Program order is as good as any, but for its updates at the end."""
    graph = graphs.training(6, 32, 1024, clipped=False)
    found = order(graph)
    assert found.peak == found.lower_bound > 0.99 * peak(graph)
    assert max(between(graph, found.operations, "dW", max)) <= 4


def between(graph: Graph, found, name: str, which) -> list[int]:
    """How far behind operations of a name their first or last readers are."""
    at = {i: k for k, i in enumerate(found)}
    named = (
        i for i, operation in enumerate(graph.operations) if operation.name == name
    )
    return [which(at[reader] - at[i] for reader in graph.after[i]) for i in named]


def test_same_order_every_time():
    graph = graphs.training(4, 128, 32)
    assert order(graph).operations == order(graph).operations


def pearls(n: int) -> Graph:
    """The same small random graph `n` times, one behind the other."""
    made, join = graphs.Builder(), None
    for _ in range(n):
        first = made.do("first", () if join is None else (join,), 10)
        values, inner = {}, graphs.randomly(7, 14, large=100, plain=True)
        for operation in inner.operations:
            ins = [values.get(v, first) for v in operation.inputs]
            size = inner.bytes_of(operation.outputs)
            values[operation.outputs[0]] = made.do("in", [first, *ins], size)
        join = made.do("join", list(values.values()), 10)
    made.output(join)
    return made.graph()


def test_segments_that_every_order_does_one_after_another():
    graph = pearls(4)
    parts = segment_ranges(order_problem(graph))
    assert [i for part in parts for i in part] == list(range(len(graph.operations)))
    inner = [part for part in parts if len(part) > 1]
    assert len(inner) == 4 and len({len(part) for part in inner}) == 1
    assert [len(p) for p in segment_ranges(order_problem(graphs.chain(1, 2, 3)))] == [
        1,
        1,
        1,
    ]


@pytest.fixture
def worked(monkeypatch):
    """The names of the steps of the search that were taken."""
    seen = []
    for name in ("swept", "improved"):
        step = getattr(order_search, name)
        counted = lambda *a, name=name, step=step: seen.append(name) or step(*a)
        monkeypatch.setattr(order_search, name, counted)
    solve, plain = lambda *a, **k: seen.append("solve") or plain(*a, **k), exact.solve
    monkeypatch.setattr(exact, "solve", solve)
    return seen


def test_segments_are_solved_by_themselves(worked):
    one = order(pearls(1))
    worked.clear()
    many = order(pearls(30))
    assert one.optimal and many.optimal and one.peak == many.peak
    assert many.segments == 60 and many.searched == 0
    # A greedy order is the best of each; it is made tidy once, and nothing is searched.
    assert worked == ["swept"] * many.segments


def test_segments_are_where_all_orders_pass():
    for seed in range(30):
        graph = graphs.randomly(seed, 7, near=3)
        ends = {part.stop for part in segment_ranges(order_problem(graph))}
        for found in brute.orders(graph):
            assert all(sorted(found[:end]) == list(range(end)) for end in ends)


def without_overwriting(graph: Graph) -> Graph:
    operations = tuple(replace(o, in_place=()) for o in graph.operations)
    return replace(graph, operations=operations)


@pytest.mark.parametrize("seed", range(40))
def test_a_pass_under_the_peak_of_its_order_does_not_raise_it(seed):
    graph = without_overwriting(graphs.randomly(seed, 1 + 7 * seed % 40))
    problem, start = order_problem(graph), best_greedy(graph)
    limit = peak(graph, start)
    forward = sweep(problem, start, limit)
    graph.check_order(forward)
    assert peak(graph, forward) <= limit
    both = swept(problem, start, limit)
    graph.check_order(both)
    assert peak(graph, both) <= limit


def test_where_a_pass_raises_the_peak_its_result_is_left():
    """One of 3,600 graphs in which nothing is overwritten."""
    graph = without_overwriting(graphs.randomly(249, 32))
    problem, start = order_problem(graph), best_greedy(graph)
    limit = peak(graph, start)
    assert peak(graph, sweep(problem, start, limit)) > limit
    assert order(graph).peak <= limit


def test_a_pass_may_raise_the_peak_where_values_are_overwritten():
    """So its result is compared; here it would take the input that another needs."""
    graph = graphs.randomly(16636, 23)
    problem, start = order_problem(graph), best_greedy(graph)
    limit = peak(graph, start)
    assert peak(graph, sweep(problem, start, limit)) > limit
    assert order(graph).peak <= limit


def test_updates_come_early_and_casts_late():
    graph = graphs.training(6, 128, 32)
    found = swept(order_problem(graph), range(len(graph.operations)), peak(graph))
    assert max(between(graph, found, "dW", max)) <= 2  # the two moments
    assert max(between(graph, found, "cast", min)) <= 4


def test_progress_and_time(worked):
    calls = []
    found = order(
        graphs.training(4, 128, 32), progress=lambda share, peak: calls.append(peak)
    )
    assert calls[-1] == found.peak
    graph = graphs.training(60, 128, 32)
    worked.clear()
    short = order(graph, time_limit=0.001)  # it is over when the graph has been read
    assert "swept" not in worked
    assert short.peak <= peak(graph, best_greedy(graph))
    assert short.lower_bound <= short.peak


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_no_time(limit):
    with pytest.raises(ValueError, match="time_limit=.*: a number, more than 0"):
        order(graphs.chain(1, 2), time_limit=limit)


@pytest.mark.slow
def test_ten_thousand_operations():
    """As many as GPT-2 XL has, one by one; well under 40 seconds on two busy cores."""
    graph = graphs.training(300, 128, 32)
    assert len(graph.operations) > 10_000
    began = time.process_time()
    found = order(graph)
    assert time.process_time() - began < 40
    assert found.gap < 0.01
