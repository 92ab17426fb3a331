"""What a step keeps for each parameter, beside the bytes of real arrays."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.optim import adama, split_master

PARAMS = {
    "layers": {"w": jnp.ones((4, 32, 64)), "b": jnp.ones((4, 64))},
    "head": jnp.ones((64, 8)),
}
COUNT = sum(x.size for x in jax.tree.leaves(PARAMS))


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree) if x.ndim)


@pytest.mark.parametrize("tx", [optax.adam(1e-3), optax.sgd(1e-2), optax.adafactor()])
def test_as_the_arrays(tx):
    """Weights, gradients, and the state that `init` makes."""
    found = jaxmem.ledger(PARAMS, tx)
    assert found.parameters == COUNT
    assert found.bytes_of("weights") == nbytes(PARAMS)
    assert found.bytes_of("gradients") == nbytes(PARAMS)
    assert found.bytes_of("moments") == nbytes(tx.init(PARAMS))
    assert found.device_bytes == 2 * nbytes(PARAMS) + nbytes(tx.init(PARAMS))
    assert found.host_bytes == 0


def test_micro_batches_need_an_accumulator_but_for_adama():
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    found = jaxmem.ledger(narrow, optax.adam(1e-3), micro_batches=4)
    assert found.bytes_of("accumulator") == 4 * COUNT
    found = jaxmem.ledger(
        narrow, optax.adam(1e-3), micro_batches=4, accumulator_dtype=jnp.bfloat16
    )
    assert found.bytes_of("accumulator") == 2 * COUNT
    assert (
        jaxmem.ledger(PARAMS, adama(1e-3), micro_batches=4).bytes_of("accumulator") == 0
    )


def test_released_gradients_are_a_layer():
    found = jaxmem.ledger(PARAMS, optax.adam(1e-3), released="layers/**")
    assert found.bytes_of("gradients") == nbytes(PARAMS["layers"]) // 4 + 4 * 64 * 8
    found = jaxmem.ledger(PARAMS, optax.adam(1e-3), gradient_dtype=jnp.bfloat16)
    assert found.bytes_of("gradients") == 2 * COUNT


def test_bytes_of_one_device():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    shard = lambda spec: NamedSharding(mesh, spec)
    shardings = {
        "layers": {"w": shard(P(None, "data")), "b": shard(P())},
        "head": shard(P("data")),
    }
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        PARAMS, shardings,
    )  # fmt: skip
    found = jaxmem.ledger(shapes, optax.adam(1e-3))
    one = nbytes(PARAMS["layers"]["w"]) // 8 + 4 * (4 * 64) + 4 * 64 * 8 // 8
    assert found.bytes_of("weights") == one
    assert found.bytes_of("moments") == 2 * one


def test_state_on_the_host():
    def init(params):
        to_host = lambda x: jax.device_put(jnp.zeros_like(x), jax.memory.Space.Host)
        return jax.tree.map(to_host, params)

    tx = optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
    found = jaxmem.ledger(PARAMS, tx)
    assert found.bytes_of("moments") == 0
    assert found.host_bytes == nbytes(PARAMS)


def test_rows_name_the_fields_and_print(tmp_path):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    found = jaxmem.ledger(PARAMS, tx)
    names = [row.name for row in found.rows if row.part == "moments"]
    assert names == ["ScaleByAdamState.mu", "ScaleByAdamState.nu"]
    assert "total" in str(found) and "16.00" in str(found)
    assert found.table().row_count == 5
    found.plot(tmp_path / "ledger.png")
    assert (tmp_path / "ledger.png").stat().st_size > 1000


def test_of_modules():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    assert jaxmem.ledger(model, optax.adam(1e-3)).parameters == 36
    params = nn.Dense(4).init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    assert jaxmem.ledger(params, optax.adam(1e-3)).parameters == 36


def test_a_master_is_told_from_the_moments_inside():
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    found = jaxmem.ledger(narrow, split_master(optax.sgd(1e-2, momentum=0.9)))
    assert found.bytes_of("masters") == COUNT
    assert found.bytes_of("moments") >= 2 * COUNT
