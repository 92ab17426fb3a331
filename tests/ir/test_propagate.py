"""From placements that are known to those around them."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem.ir.placements import REPLICATE, SUM, Partial, Placements, Shard
from jaxmem.ir.placements.propagate import Propagation, Worklist
from jaxmem.ir.placements.rules import same_axis


def product():
    a, b = jnp.zeros((2, 4)), jnp.zeros((4, 6))
    (eqn,) = jax.make_jaxpr(lambda a, b: a @ b)(a, b).eqns
    return eqn


def test_the_least_comes_first_and_of_equals_the_first():
    work, seen = Worklist(), []
    for rank, thing in ((2, "c"), (1, "a"), (1, "b")):
        work.push(rank, thing)
    for thing in work:
        seen.append(thing)
        if thing == "a":  # what is pushed meanwhile is seen too
            work.push(0, "now")
            work.push(3, "last")
    assert seen == ["a", "now", "b", "c", "last"]


def test_what_an_equation_takes_cut_is_wanted_where_it_is_whole():
    eqn, known = product(), Propagation()
    (a, b), (out,) = eqn.invars, eqn.outvars
    known.of[a] = Shard(1)
    known.place(0, eqn, Placements((Shard(1), Shard(0)), (SUM,)))
    assert known.wanted == {b: Shard(0)}
    assert known.all_at([a, b, out]) == [Shard(1), REPLICATE, Partial("add")]
    assert known.asked(eqn) == [REPLICATE]
    assert known.axes == {a: 1}


def test_an_equation_tells_its_operands_too():
    eqn, known = product(), Propagation()
    (a, b), (out,) = eqn.invars, eqn.outvars
    known.of[out] = Shard(0)
    found = Placements((Shard(0), REPLICATE), (Shard(0),))
    assert list(known.extend(3, eqn, found)) == [a]
    assert known.placed == {3: found} and known.at(b) == REPLICATE


@pytest.mark.parametrize(
    "k, axis, same",
    [
        (0, 0, (0, None, 0)),
        (0, 1, (1, 0, None)),
        (1, 1, (None, 1, 1)),
        (2, 0, (0, None, 0)),
    ],
)
def test_axes_of_a_product_that_are_one(k, axis, same):
    assert same_axis(product(), k, axis, 2) == same


def test_an_axis_that_cannot_be_cut_is_no_other_axis():
    (eqn,) = jax.make_jaxpr(lambda x: jnp.cumsum(x, 0))(jnp.zeros((4, 4))).eqns
    eqn = eqn.params["jaxpr"].eqns[0] if "jaxpr" in eqn.params else eqn
    assert same_axis(eqn, 0, 0, 2) is None
    assert same_axis(eqn, 0, 1, 2) == (1, 1)
