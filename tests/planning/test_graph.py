"""What a graph knows of itself, and what it refuses."""

import pytest

from jaxmem.planning import Graph, Operation, Value


def values(n: int) -> tuple[Value, ...]:
    return (Value(4),) * n


DIAMOND = Graph(
    (
        Operation("a", (0,), (1,)),
        Operation("b", (1,), (2,)),
        Operation("c", (1, 1), (3,)),
        Operation("d", (2, 3, 1), (4,)),
    ),
    values(5),
    arguments=(0,),
    outputs=(4,),
)


def test_neighbours():
    assert DIAMOND.maker == {1: 0, 2: 1, 3: 2, 4: 3}
    assert DIAMOND.readers == [(0,), (1, 2, 3), (3,), (3,), ()]
    assert DIAMOND.before == [(), (0,), (0,), (1, 2, 0)]
    assert DIAMOND.after == [(1, 2, 3), (3,), (3,), ()]
    assert DIAMOND.bytes_of((1, 2)) == 8


@pytest.mark.parametrize(
    "order, why",
    [
        ((0, 1, 2), "once"),
        ((0, 1, 1, 3), "once"),
        ((0, 1, 3, 2), "operation 3 comes before 2"),
    ],
)
def test_orders_that_are_none(order, why):
    with pytest.raises(ValueError, match=f"order: .*{why}"):
        DIAMOND.check_order(order)
    DIAMOND.check_order((0, 2, 1, 3))


READ = Operation("read", (0,), (1,))


@pytest.mark.parametrize(
    "arguments, why",
    [
        (((READ,), values(2)), r"operations\[0\] \(read\) reads value 0 before"),
        (((READ, READ), values(2), (0,)), r"operations\[1\] .* value 1 a second time"),
        (((READ,), values(3), (0,), (2,)), "outputs: value 2 is never made"),
        (((READ,), values(2), (0,), (), {1: 0}), "aliases: value 1 is not an output"),
        (((READ,), values(2), (0,), (0,), {0: 0}), "aliases: value 0 is not an output"),
        (((READ,), values(2), (0,), (1,), {1: 1}), "aliases: value 1 is not an argu"),
        (
            ((Operation("two", (0,), (1, 2)),), values(3), (0,), (1, 2), {1: 0, 2: 0}),
            "aliases: two outputs in argument 0",
        ),
        (
            ((Operation("x", (0,), (1,), in_place=((0, 1),)),), values(2), (0,)),
            r"operations\[0\] \(x\) in_place: \(0, 1\)",
        ),
    ],
)
def test_graphs_that_are_none(arguments, why):
    with pytest.raises(ValueError, match=why):
        Graph(*arguments)
