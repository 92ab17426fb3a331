"""Programs that do operations in a given sequence."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxmem.ir import jaxprs
from jaxmem.scheduling.order.sequence import in_sequence
from jaxmem.scheduling.predict.operations import operations_of

N, CHAIN, READERS = 64, 20, 8


def chain_with_readers(x, weights):
    """A chain of names: none of them is in memory, each product reads its start."""
    h = jnp.sin(x)
    for k in range(CHAIN):
        h = checkpoint_name(h, f"h{k}")
    return [h @ w for w in weights]


def test_what_is_not_in_memory_is_written_once():
    """A program does not grow by the readers of what does not exist in memory."""
    x = jnp.linspace(-1, 1, N * N).reshape(N, N)
    weights = [x + k for k in range(READERS)]
    closed = jax.make_jaxpr(chain_with_readers)(x, weights)
    ops = operations_of(closed)
    found = in_sequence(ops, range(len(ops.graph.operations)))
    count = lambda jaxpr: len(jaxprs.split(jaxpr)[0].eqns)
    assert count(closed) == 1 + CHAIN + READERS
    assert count(found) == count(closed)
    got = jaxprs.evaluate(found, [x, *weights])
    for a, b in zip(got, chain_with_readers(x, weights), strict=True):
        np.testing.assert_array_equal(a, b)  # the same operations one by one


def test_what_is_repeated_is_written_a_second_time():
    """All that leads to it from values that wait in a barrier."""
    x = jnp.linspace(-1, 1, N * N).reshape(N, N)

    def fn(x, w):
        h = jnp.tanh(x @ w)
        y = jnp.sin(h @ w) @ w
        return y, h @ y

    closed = jax.make_jaxpr(fn)(x, x)
    ops = operations_of(closed)
    order = list(range(len(ops.graph.operations)))
    found = in_sequence(ops, [*order[:-1], order[0], order[-1]])
    products = lambda jaxpr: sum(
        eqn.primitive.name == "dot_general" for eqn in jaxprs.split(jaxpr)[0].eqns
    )
    assert products(found) == products(closed) + 1
    for a, b in zip(jaxprs.evaluate(found, [x, x]), fn(x, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
