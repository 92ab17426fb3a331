"""What a step on a table takes is proportional to the ids."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem import optim
from tests.optim.rows.problem import LR, batches, loss, params, train_step

MIB = 2**20
ROWS, WIDTH, IDS = 16384, 32, 32
RULES = {
    "sgd": optim.rowwise_sgd(LR),
    "adagrad": optim.rowwise(optax.adagrad(LR)),
    "one accumulator a row": optim.rowwise_adagrad(LR),
    "lazy adam": optim.lazy_adam(LR),
}


@pytest.fixture(autouse=True)
def loose_promotion():
    """Optax multiplies numbers of several dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def compiled(tx, place=lambda tree: tree):
    given = params(ROWS, WIDTH)
    state = place((given, tx.init(given)))
    ids = batches(1, ROWS, IDS)[0]
    step = jax.jit(train_step(tx), donate_argnums=0)
    return step.lower(state, ids).compile(), state, ids


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.fast("adagrad", "lazy adam")
@pytest.mark.parametrize("name", RULES)
def test_arrays_of_ids_alone(name):
    """Some [ids, width] arrays, and all state in place: a table has 512 times more."""
    program, state, _ = compiled(RULES[name])
    sizes = program.memory_analysis()
    assert sizes.temp_size_in_bytes < 24 * IDS * WIDTH * 4 < ROWS * WIDTH * 4 / 16
    assert sizes.alias_size_in_bytes >= nbytes(state)


@pytest.mark.fast("lazy adam")
@pytest.mark.parametrize("name", ["sgd", "lazy adam", "one accumulator a row"])
def test_rows_over_devices_are_never_gathered(name):
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    spec = lambda x: PartitionSpec(*["rows"] * (x.shape[:1] == (ROWS,)))
    put = lambda x: jax.device_put(x, NamedSharding(mesh, spec(x)))
    place = lambda tree: jax.tree.map(put, tree)
    want, state, ids = compiled(RULES[name])
    want = want(state, ids)[0]
    program, state, ids = compiled(RULES[name], place)
    sizes = program.memory_analysis()
    assert sizes.temp_size_in_bytes < 24 * IDS * WIDTH * 4 < ROWS * WIDTH * 4 / 8 / 2
    moves = r"= (.*) (?:all-gather|all-reduce|all-to-all|collective-permute)\("
    moved = re.findall(moves, program.as_text())  # each may be a tuple of arrays
    shapes = [s for types in moved for s in re.findall(r"\w+\[([\d,]*)\]", types)]
    assert shapes and all(_elements(s) <= IDS * WIDTH for s in shapes)
    got = program(state, ids)[0]
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        if x.shape[:1] == (ROWS,):
            assert x.sharding.shard_shape(x.shape)[0] == ROWS // 8


def _elements(shape):
    return int(np.prod([int(n) for n in shape.split(",") if n], dtype=int))


def test_accumulators_are_sharded_as_the_rows():
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    table = jax.device_put(
        jnp.ones((64, 4)), NamedSharding(mesh, PartitionSpec("rows", None))
    )
    sums = optim.rowwise_adagrad(LR).init(table)[0].sums
    assert sums.sharding.shard_shape(sums.shape) == (8,)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "tpu-v5e"])
@pytest.mark.parametrize("name", RULES)
def test_a_large_table_on_a_chip(name, target):
    """200,000 x 256 and 512 ids: the dense gradient is 195 MiB."""
    shape = jax.ShapeDtypeStruct
    given = {"embed": {"table": shape((200_000, 256), jnp.float32)}}
    given["w"] = shape((256, 256), jnp.float32)
    tx = RULES[name]
    state = given, jax.eval_shape(tx.init, given)
    ids = shape((512,), jnp.int32)
    report = jaxmem.estimate(
        train_step(tx, loss=loss), state, ids, target=target, donate_argnums=0
    )
    print(name, target, report.temp_bytes / MIB)
    assert report.temp_bytes <= 4 * MIB
    # all but the loss, and the addresses of a tuple's outputs
    assert report.output_bytes - report.alias_bytes <= 1024
