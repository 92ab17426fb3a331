"""What parts of a sum are combined with at first changes nothing of the first part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmem.ir.graph import JaxprGraph
from jaxmem.scheduling.tiling.sums import moves_behind, neutral, wide

NUMBERS = ("float8_e4m3fn", "bfloat16", "float32", "int8", "uint8", "int32")
CASES = [(c, d) for c in ("add", "mul", "max", "min") for d in NUMBERS]
CASES += [(c, d) for c in ("max", "min") for d in ("bool",)]
BITS = ("bitwise_or", "bitwise_xor", "bitwise_and")
CASES += [(c, d) for c in BITS for d in ("bool", "int32", "uint8")]


@pytest.mark.parametrize("combine, dtype", CASES, ids=lambda x: x)
def test_a_part_is_itself_when_combined_with_the_first(combine, dtype):
    part = jnp.array([0, 1, 3, 100, 7]).astype(dtype)
    if jnp.issubdtype(dtype, jnp.signedinteger) or jnp.issubdtype(dtype, jnp.floating):
        part = jnp.concatenate([part, -part])
    first = neutral(combine, jax.typeof(part))
    total = getattr(lax, combine)(first, part.astype(first.dtype))
    assert first.dtype == wide(part.dtype)
    np.testing.assert_array_equal(total, part.astype(first.dtype))


@pytest.mark.parametrize(
    ("behind", "others", "moves"),
    [
        (lambda y: -y.T.astype(jnp.float32), (), 3),
        (lambda y: -y.T.astype(jnp.float32), (2,), 1),
        (lambda y: y.T.astype(jnp.int32), (), 1),
        (lambda y: (y.T, y), (), 0),
        (lambda y: y.T * 2, (), 1),
        (lambda y: y, (), 0),
    ],
    ids=["all", "up to another", "an integer", "two readers", "a product", "none"],
)  # fmt: skip
def test_moves_behind_a_sum_are_those_that_alone_read_it(behind, others, moves):
    x = jnp.ones((2, 3), jnp.bfloat16)
    graph = JaxprGraph(jax.make_jaxpr(lambda x: behind(x @ x.T))(x))
    (i,) = (i for i, e in enumerate(graph.eqns) if e.primitive.name == "dot_general")
    (total,) = graph.eqns[i].outvars
    found, end = moves_behind(graph, total, {i + k for k in others})
    assert found == list(range(i + 1, i + 1 + moves))
    assert end is (graph.eqns[found[-1]].outvars[0] if found else total)
