"""Loops that are taken from others: those that compute the same, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmem.ir.same_loops import loops_once

X = jnp.ones(3)


def loop(inner, more):
    """A loop that stacks what `inner` gives, and its carries if there is `more`."""
    stacked = lambda c: (inner(c), c) if more else inner(c)
    return lambda x: lax.scan(lambda c, _: (jnp.cos(c), stacked(c)), x, None, 4)


def both(one, other):
    return jax.make_jaxpr(lambda x: (loop(one, False)(x), loop(other, True)(x)))(X)


def scans(closed):
    return sum(eqn.primitive.name == "scan" for eqn in closed.eqns)


def same_values(one, other):
    pairs = (jax.core.eval_jaxpr(c.jaxpr, c.consts, X) for c in (one, other))
    for a, b in zip(*pairs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_loop_is_taken_from_one_that_does_more():
    closed = both(jax.jit(jnp.sin), jax.jit(jnp.sin))
    once = loops_once(closed)
    assert (scans(closed), scans(once)) == (2, 1)
    same_values(once, closed)


@pytest.mark.parametrize("wrap", [jax.jit, lambda fn: jax.jit(jax.jit(fn))])
def test_constants_of_inner_functions_tell_loops_apart(wrap):
    """The text of a jaxpr names its constants, and does not tell their values."""
    low, high = (np.arange(3, dtype=np.float32) + k for k in (0, 5))
    closed = both(wrap(lambda c: jnp.sin(c) + low), wrap(lambda c: jnp.sin(c) + high))
    same_values(loops_once(closed), closed)
