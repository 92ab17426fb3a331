"""The greedy orders: valid, and each by its own rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem import planning
from jaxmem.planning import Graph, peak
from jaxmem.planning.order.greedy import GREEDY
from tests.planning import graphs

MIB = 2**20  # so that no operation is a scalar


def names(graph: Graph, order) -> str:
    return "".join(graph.operations[i].name for i in order)


def seven(**sizes: int) -> Graph:
    return graphs.seven(**{k: v * MIB for k, v in sizes.items()})


def test_comment_of_the_list_scheduler():
    """It puts B off because of its size, and then has it when F is there."""
    graph = seven(**graphs.COMMENT)
    order = planning.list_order(graph)
    assert names(graph, order) in ("ADEFBCG", "AEDFBCG")
    assert peak(graph, order) == 6 * MIB
    assert peak(graph) == 5 * MIB


def test_list_order_has_scalars_first():
    made = graphs.Builder()
    made.output(made.do("x", (), 100))
    made.output(made.do("y", (made.do("n", (), 4),), 4))
    assert names(made.graph(), planning.list_order(made.graph())) == "nyx"


def test_list_order_sees_when_a_value_comes_to_have_one_reader():
    """Of a's readers d makes least; then c frees more than it makes, before x."""
    made = graphs.Builder()
    a = made.do("a", (), 64)
    for name, size in (("c", 40), ("d", 16)):
        made.output(made.do(name, (a,), size))
    made.output(made.do("x", (), 20))
    assert names(made.graph(), planning.list_order(made.graph())) == "xadc"


def test_depth_first_order_takes_the_input_with_most_behind():
    made = graphs.Builder()
    small, large = made.do("s", (), 16), made.do("l", (), 64)
    made.output(made.do("+", (small, large), 16))
    assert names(made.graph(), planning.depth_first_order(made.graph())) == "ls+"
    assert names(made.graph(), planning.post_order(made.graph())) == "sl+"


def test_depth_first_order_takes_fan_out_before_bytes():
    made = graphs.Builder()
    wide, large = made.do("w", (), 16), made.do("l", (), 64)
    made.output(made.do("+", (large, wide), 16))
    made.output(made.do("-", (wide,), 16))
    assert names(made.graph(), planning.depth_first_order(made.graph())).startswith("w")


def test_post_order_does_what_nothing_reads():
    made = graphs.Builder()
    a = made.do("a", (), 16)
    made.do("dead", (a,), 16)
    made.output(made.do("b", (a,), 16))
    assert planning.post_order(made.graph()) == (0, 2, 1)


def test_least_peak_first():
    """c fits under the peak that a and b have made, so it is done before d."""
    made = graphs.Builder()
    a = made.do("a", (), 40)
    b = made.do("b", (a,), 10)
    made.output(made.do("d", (b,), 60))
    made.output(made.do("c", (b,), 30))
    graph = made.graph()
    assert names(graph, planning.least_peak_first_order(graph)) == "abcd"


@pytest.mark.parametrize("order", GREEDY, ids=lambda f: f.__name__)
@given(seed=st.integers(0, 10**6), n=st.integers(0, 30))
def test_orders_are_valid(order, seed, n):
    graph = graphs.randomly(seed, n)
    graph.check_order(order(graph))


def test_best_of_them():
    graph = graphs.training(3, tokens=256)
    peaks = {order.__name__: peak(graph, order(graph)) for order in GREEDY}
    assert len(set(peaks.values())) > 2
    assert peak(graph, planning.best_greedy(graph)) == min(peaks.values())
    compiled = ("list_order", "depth_first_order", "post_order")
    assert peak(graph, planning.xla_order(graph)) == min(peaks[k] for k in compiled)
    assert planning.program_order(graph) == tuple(range(len(graph.operations)))
