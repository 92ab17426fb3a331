"""What is said to XLA for one GPU, and to nobody else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.ir.one_gpu import compiled_here, index_after, row_major

X = np.arange(24.0, dtype=np.float32).reshape(8, 3)
CONSTRAINT = "LayoutConstraint"


def lowered(fn, *args, platform="cuda") -> str:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def late(j, x):
    return index_after(j, j, x[0, 0])


def test_the_layout_is_told_to_one_gpu():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    spread = jax.ShapeDtypeStruct(
        X.shape, X.dtype, sharding=NamedSharding(mesh, P("x"))
    )
    assert CONSTRAINT in lowered(row_major, X)
    assert CONSTRAINT not in lowered(row_major, X, platform="tpu")
    assert CONSTRAINT not in lowered(row_major, spread)
    one_shard = jax.shard_map(row_major, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    assert CONSTRAINT in lowered(one_shard, spread)


def test_the_index_waits_on_one_gpu():
    assert "clamp" in lowered(late, jnp.int32(1), X)
    assert "clamp" not in lowered(late, jnp.int32(1), X, platform="cpu")


def test_users_export_what_is_told_to_nobody():
    def export():
        step = jax.jit(lambda x: row_major(x))  # jax keeps what it has lowered
        return jax.export.export(step, platforms=["cuda"])(X).mlir_module()

    assert CONSTRAINT not in export()
    with compiled_here(), pytest.raises(ValueError, match=CONSTRAINT):
        export()  # which `jaxmem.estimate` allows by name


def test_both_are_identities():
    x = jnp.asarray(X)
    np.testing.assert_array_equal(row_major(x), X)
    np.testing.assert_array_equal(jax.vmap(row_major, in_axes=1, out_axes=1)(x), X)
    np.testing.assert_array_equal(jax.grad(lambda x: row_major(x).sum())(x), 1)
    assert int(jax.vmap(late, in_axes=(None, 0))(jnp.int32(3), x[None])[0]) == 3
