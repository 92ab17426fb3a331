"""Numbers of numpy and of jax in the place of Python's: the same results.

`untyped`: the tests' type checker in front of the functions knows Python's alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem import ops, optim, planning
from jaxmem._checks import check_float, check_int, shown
from tests.bad_calls.functions import BUFFERS, GRAPH
from tests.bad_calls.steps import W, X, step

INTS = [np.int64, np.int32, np.uint8, np.array, jnp.int32]
FLOATS = [np.float64, np.float32, np.array, jnp.float32, jnp.bfloat16]
KEY = jax.random.key(0)
ARRAY = jnp.arange(8.0).reshape(2, 4)


@pytest.mark.parametrize("kind", INTS)
def test_ints(kind):
    assert check_int("n", kind(3), 1, 3) == 3 and type(check_int("n", kind(3))) is int
    assert check_float("x", kind(3)) == 3.0


@pytest.mark.parametrize("kind", FLOATS)
def test_floats(kind):
    assert check_float("x", kind(0.5), above=0) == 0.5
    assert type(check_float("x", kind(0.5))) is float
    with pytest.raises(TypeError, match="n="):
        check_int("n", kind(3.0))


def test_a_traced_number_is_told_from_a_known_one():
    with pytest.raises(TypeError, match=r"n=int32\[\]: an int"):
        jax.eval_shape(lambda n: check_int("n", n), jnp.int32(3))
    with pytest.raises(TypeError, match=r"x=float32\[\]: a number that is known here"):
        jax.eval_shape(lambda x: check_float("x", x), jnp.float32(3))


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "None"),
        ("x", "'x'"),
        (ARRAY, "float32[2,4]"),
        (np.float32(2), "np.float32(2.0)"),
        ({"a": ARRAY, "b": [1, (2,)]}, "{'a': float32[2,4], 'b': [1, (2,)]}"),
        (optax.EmptyState(), "EmptyState()"),
        (optax.TraceState(ARRAY), "TraceState(trace=float32[2,4])"),
        ("x" * 200, f"'{'x' * 96}..."),
    ],
)
def test_values_in_messages(value, text):
    assert shown(value) == text


# (call of a number, the number, kinds that it may be of)
def loss(params, batch, rng):
    return jnp.mean(batch @ params)


CALLS = {
    "adama": (lambda n: optim.adama(0.1, micro_batches=n), 2, INTS),
    "b1": (lambda x: optim.adama(0.1, b1=x), 0.5, FLOATS),
    "learning_rate": (lambda x: optim.FusedAdam(x), 0.5, FLOATS),
    "MultiSteps": (lambda k: optim.MultiSteps(optax.sgd(0.1), k), 2, INTS),
    "max_norm": (lambda x: optim.clip_by_layer_norm(x), 0.5, FLOATS),
    "microbatch": (lambda n: jaxmem.microbatch(loss, optax.sgd(0.1), n), 2, INTS),
    "budget": (lambda b: jaxmem.schedule(step, budget=b), 2**20, INTS[:2]),
    "donate": (lambda i: jaxmem.schedule(step, donate_argnums=i), 0, INTS),
    "several": (lambda i: jaxmem.schedule(step, donate_argnums=[i]), 0, INTS),
    "residuals": (
        lambda i: (
            jaxmem.residuals(lambda w, x: jnp.sum(x @ w), W, X, argnums=i).entries
        ),
        1,
        INTS,
    ),
    "mesh": (lambda n: jaxmem.target_mesh("h100", (n,), "data"), 2, INTS),
    "capacity": (lambda n: planning.layout(BUFFERS, capacity=n).offsets, 16, INTS),
    "alignment": (lambda n: planning.lifetimes(GRAPH, alignment=n), 4, INTS),
    "order": (lambda i: planning.peak(GRAPH, (0, i)), 1, INTS),
    "flops": (lambda x: planning.seconds(x)(GRAPH.operations[0]), 2.0, FLOATS),
    "size": (lambda n: planning.Buffer(0, 0, n, n), 2, INTS),
    "layer_norm": (lambda x: ops.layer_norm(ARRAY, epsilon=x), 0.5, FLOATS),
    "axis": (lambda i: ops.layer_norm(ARRAY, axis=i), 1, INTS),
    "axes": (lambda i: ops.softmax(ARRAY, axis=(0, i)), 1, INTS),
    "groups": (lambda n: ops.group_norm(ARRAY, num_groups=n), 2, INTS),
    "dropout": (lambda x: ops.dropout(ARRAY, x, KEY), 0.5, FLOATS),
    "dims": (lambda i: ops.dropout(ARRAY, 0.5, KEY, broadcast_dims=(i,)), 1, INTS),
    "dense": (lambda i: ops.dense(ARRAY, jnp.ones((4, 2)), axis=i), 1, INTS),
    "pool": (lambda n: ops.max_pool(ARRAY, (n,)), 2, INTS),
    "bits": (lambda n: ops.gelu(ARRAY, save=n), 2, INTS),
    "quantization": (lambda n: ops.Quantization(n), 4, INTS[:3]),
    "softcap": (
        lambda x: ops.linear_cross_entropy(
            ARRAY, jnp.ones((4, 3)), jnp.array([0, 1]), softcap=x
        ),
        2.0,
        (np.float64, jnp.bfloat16),
    ),
}


# functions and objects that equal themselves alone
MADE = {"adama", "b1", "learning_rate", "MultiSteps", "max_norm", "microbatch"}
MADE |= {"budget", "donate", "several"}


@pytest.mark.parametrize("name", CALLS)
def test_numbers_of_other_libraries(name, untyped):
    call, number, kinds = CALLS[name]
    want = call(number)
    for kind in kinds:
        got = call(kind(number))
        if isinstance(want, jax.Array):
            np.testing.assert_array_equal(got, want)
        elif name not in MADE:
            assert got == want
