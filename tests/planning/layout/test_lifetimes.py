"""Buffers of an order, by hand: who shares bytes, and for how long."""

import pytest

from jaxmem.planning import Graph, Operation, Value, lifetimes, profile


def graph(aliases=None, in_place=()):
    """Argument 0; 1 and 2 made of it; 3 of both, and given back."""
    return Graph(
        (
            Operation("f", (0,), (1,)),
            Operation("g", (0,), (2,), scratch=5),
            Operation("h", (1, 2), (3,), in_place=in_place),
        ),
        (Value(8), Value(8), Value(4), Value(8)),
        (0,),
        (3,),
        aliases or {},
    )


def spans(found):
    return {b.id: (b.lower, b.upper, b.size) for b in found.buffers}


def test_values_and_scratch_have_buffers_of_their_own():
    found = lifetimes(graph())
    sizes = [*spans(found).values()]
    assert sizes == [(0, 3, 8), (1, 3, 4), (2, 3, 8), (1, 2, 5)]
    assert set(found.values) == {1, 2, 3} and set(found.scratch) == {1}


def test_what_is_written_over_an_input_is_in_its_buffer():
    found = lifetimes(graph(in_place=((3, 1), (3, 2))))
    assert found.values[3] == found.values[1] != found.values[2]
    assert spans(found)[found.values[3]] == (0, 3, 8)


def test_a_donated_result_waits_only_while_the_argument_is_read():
    last = lifetimes(graph(aliases={3: 0}))
    assert 3 not in last.values
    waiting = Graph(
        (Operation("new", (0,), (1,)), Operation("old", (0,), (2,))),
        (Value(8), Value(8), Value(4)),
        (0,),
        (1, 2),
        {1: 0},
    )
    found = lifetimes(waiting)
    assert spans(found)[found.values[1]] == (0, 2, 8)
    assert 1 not in lifetimes(waiting, (1, 0)).values


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_the_load_is_the_profile(order):
    subject = graph(in_place=((3, 1),))
    held = lifetimes(subject, order).buffers
    load = [sum(b.size for b in held if b.lower <= t < b.upper) for t in range(3)]
    assert load == profile(subject, order)


def test_sizes_are_rounded_up_and_bad_input_is_refused():
    assert {b.size for b in lifetimes(graph(), alignment=16).buffers} == {16}
    with pytest.raises(ValueError, match="alignment=0"):
        lifetimes(graph(), alignment=0)
    with pytest.raises(ValueError, match="order"):
        lifetimes(graph(), (2, 1, 0))
