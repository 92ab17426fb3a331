"""Ops on meshes of explicit axes, where every array's type says how it is sharded."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem import ops

X = jax.random.normal(jax.random.key(0), (8, 16, 32))
SCALE = 1 + jax.random.normal(jax.random.key(1), (32,)) / 4
BIAS = jax.random.normal(jax.random.key(2), (32,))
TABLE = jax.random.normal(jax.random.key(3), (24, 32))
IDS = jax.random.randint(jax.random.key(4), (8, 4), -24, 24)
HEADS = jax.random.normal(jax.random.key(5), (8, 16, 4, 8))
WEIGHTS = jax.random.uniform(jax.random.key(6), (8, 4))
ROWS, BOTH = P("data", None, None), P("data", None, "model")

# the op; its arguments, the first of which is differentiated by; how each is sharded
CASES = {
    "layer_norm, output": (
        lambda x, *how: ops.layer_norm(x, *how, save="output"),
        ((X, BOTH), (SCALE, P("model")), (BIAS, P("model"))),
    ),
    "layer_norm, output, rows": (
        lambda x, *how: ops.layer_norm(x, *how, save="output"),
        ((X, ROWS), (SCALE, P()), (BIAS, P())),
    ),
    "layer_norm, input": (
        lambda x, *how: ops.layer_norm(x, *how, save="input"),
        ((X, BOTH), (SCALE, P("model")), (BIAS, P("model"))),
    ),
    "rms_norm, output": (
        lambda x, scale: ops.rms_norm(x, scale, save="output"),
        ((X, BOTH), (SCALE, P("model"))),
    ),
    "gelu, output": (lambda x: ops.gelu(x, save="output"), ((X, BOTH),)),
    "softmax": (ops.softmax, ((X, ROWS),)),
    "swiglu": (lambda x: ops.swiglu(x, x), ((X, BOTH),)),
    "attention": (
        lambda q: ops.dot_product_attention(q, q, q),
        ((HEADS, P("data", None, "model", None)),),
    ),
    "embed, ids": (ops.embed, ((TABLE, P()), (IDS, P("data")))),
    "embed, columns": (ops.embed, ((TABLE, P(None, "model")), (IDS, P("data")))),
    "embed, FSDP": (ops.embed, ((TABLE, P(None, "data")), (IDS, P("data")))),
    "embed, rows": (ops.embed, ((TABLE, P("model")), (IDS, P("data")))),
    "embedding_bag": (
        lambda table, ids, weights: ops.embedding_bag(table, ids, weights, "mean"),
        ((TABLE, P()), (IDS, P("data")), (WEIGHTS, P("data"))),
    ),
}


def value_and_grad(op):
    loss = lambda x, *others: jnp.sum(jnp.sin(op(x, *others)))
    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize("name", CASES)
def test_equals_the_op_on_one_device(name):
    op, given = CASES[name]
    want = value_and_grad(op)(*(x for x, _ in given))
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in given]
        found = value_and_grad(op)(*args)
        assert jax.typeof(found[1]).sharding.spec == jax.typeof(args[0]).sharding.spec
    # Sums of 4,096 and fewer terms in another order. Around its minimum a gelu's slope
    # goes with the root of what its output is above that, and so does an error of it.
    atol = float(jnp.finfo(X.dtype).eps) ** 0.5 if name == "gelu, output" else 1e-5
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(found), strict=True):
        assert jnp.allclose(a, jax.device_get(b), rtol=1e-5, atol=atol)


def test_rows_out_of_the_table_are_as_without_a_mesh():
    ids = jnp.array([0, 24, -25, -1])
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Explicit,) * 2)
    for mode in ("fill", "clip"):
        want = ops.embed(TABLE, ids, out_of_range=mode)
        with jax.set_mesh(mesh):
            placed = jax.device_put(ids, NamedSharding(mesh, P("data")))
            table = jax.device_put(TABLE, NamedSharding(mesh, P()))
            found = ops.embed(table, placed, out_of_range=mode)
        assert jnp.array_equal(want, jax.device_get(found), equal_nan=True)
