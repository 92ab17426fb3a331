"""The bytes alive, counted by hand and another way."""

from hypothesis import given
from hypothesis import strategies as st

from jaxmem.planning import Graph, Operation, Value, peak, profile
from jaxmem.planning._live_ranges import overwritten_bytes
from tests.planning import graphs
from tests.planning.work import lines


def test_chain():
    assert profile(graphs.chain(3, 5, 2)) == [3, 8, 7]
    assert peak(graphs.chain(3, 5, 2)) == 8
    assert peak(Graph((), ())) == 0


def test_what_is_never_read_is_there_while_it_is_made():
    two = Operation("two", (), (0, 1), scratch=7)
    graph = Graph((two, Operation("next", (0,), (2,))), (Value(1), Value(4), Value(2)))
    assert profile(graph) == [12, 3]


def test_an_output_is_written_over_one_of_its_candidates():
    def graph(*pairs):
        made = graphs.Builder()
        a, b = made.do("a", (), 5), made.do("b", (), 3)
        made.output(
            made.do("add", (a, b), 4, over=pairs and [(a, b)[k] for k in pairs])
        )
        return made.graph()

    assert profile(graph())[-1] == 12
    assert profile(graph(1))[-1] == 9
    assert profile(graph(1, 0))[-1] == 8  # the largest saving, and only one


def test_not_written_over_what_is_still_read():
    made = graphs.Builder()
    a = made.do("a", (), 5)
    made.output(made.do("b", (a,), 5, over=(a,)))
    made.output(made.do("c", (a,), 5, over=(a,)))
    assert profile(made.graph()) == [5, 10, 10]
    made.output(a)
    assert profile(made.graph()) == [5, 10, 15]


def test_donation():
    made = graphs.Builder()
    weight = made.argument(8)
    gradient = made.do("gradient", (), 2)
    new = made.do("update", (weight, gradient), 8)
    made.output(new, donated=weight)
    assert profile(made.graph()) == [2, 2]  # in the buffer of the weight
    made.output(made.do("late", (weight,), 1))
    late = made.graph()
    assert profile(late) == [2, 10, 9]  # waits till the weight has been read
    assert profile(late, (0, 2, 1)) == [2, 3, 3]


def test_pairs_are_taken_once_largest_first():
    assert overwritten_bytes([]) == 0
    assert overwritten_bytes([(3, 0, 5), (4, 1, 5)]) == 4
    assert overwritten_bytes([(3, 0, 5), (4, 0, 6), (2, 1, 5)]) == 6
    assert (
        overwritten_bytes([(3, 0, 1), (2, 1, 0)]) == 5
    )  # outputs and inputs count apart


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_counted_from_the_sets(seed, n):
    """Alive: made, and read later; so the bytes before each operation by definition."""
    graph = graphs.randomly(seed, n)
    order = range(n)
    found = profile(graph)
    for at in order:
        operation, later = graph.operations[at], set(range(at + 1, n))
        there = alive(graph, set(range(at)))
        made = sum(size(graph, v, {*later, at}, at) for v in operation.outputs)
        most = there + made + operation.scratch
        assert found[at] <= most
        if not operation.in_place:
            assert found[at] == most


def alive(graph, done) -> int:
    left = set(range(len(graph.operations))) - done
    return sum(
        size(graph, v, left, maker)
        for v, maker in graph.maker.items()
        if maker in done and (v in graph.outputs or left & set(graph.readers[v]))
    )


def size(graph, v, left, maker) -> int:
    """Bytes of a value that is there; none in the buffer of a dead argument."""
    waits = left - {maker}
    if v in graph.aliases and not waits & set(graph.readers[graph.aliases[v]]):
        return 0
    return graph.values[v].bytes


def test_an_operation_is_the_same_work_in_a_graph_of_any_size():
    small, large = (graphs.training(layers) for layers in (10, 200))
    assert len(large.operations) > 7_000
    each = [
        lines(lambda graph=graph: profile(graph)) / len(graph.operations)
        for graph in (small, large)
    ]
    assert each[1] <= each[0]
