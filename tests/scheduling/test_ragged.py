"""Mixtures of experts on a GPU: their products in blocks of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from tests.memory.test_estimate import needs_h100

SDS = jax.ShapeDtypeStruct
LAYERS, GROUPS, ROWS, WIDTH = 2, 64, 8192, 64
HOW = {"target": "h100", "donate_argnums": 0, "progress": False}
AUTO = (jax.sharding.AxisType.Auto,)
pytestmark = [pytest.mark.usefixtures("standard_jax"), needs_h100]


def experts(x, w, sizes):
    return lax.ragged_dot(jax.nn.silu(lax.ragged_dot(x, w, sizes)), w, sizes)


def make_step(mixture=experts):
    def loss(w, x, sizes):
        layer = lambda x, w: (x + mixture(x, w, sizes), None)
        return (lax.scan(layer, x, w)[0] ** 2).mean()

    def step(w, x, sizes):
        value, grads = jax.value_and_grad(loss)(w, x, sizes)
        return w - 0.1 * grads, value

    return step


def shapes(mesh=None, spec=None, sizes=(GROUPS,), rows=ROWS):
    where = None if mesh is None else NamedSharding(mesh, spec or P())
    whole = None if mesh is None else NamedSharding(mesh, P())
    return (
        SDS((LAYERS, GROUPS, WIDTH, WIDTH), jnp.float32, sharding=whole),
        SDS((rows, WIDTH), jnp.float32, sharding=where),
        SDS(sizes, jnp.int32, sharding=where if len(sizes) > 1 else whole),
    )


def values(args):
    rng = np.random.default_rng(0)
    w, x = (0.1 * rng.standard_normal(a.shape, np.float32) for a in args[:2])
    sizes = rng.multinomial(ROWS // 4, np.ones(GROUPS) / GROUPS, args[2].size // GROUPS)
    if args[2].ndim == 1:
        sizes = 4 * sizes[0]
    put = lambda v, a: jax.device_put(jnp.asarray(v, a.dtype), a.sharding)
    return tuple(map(put, (w, x, sizes), args))


def trained(step, args):
    (w, *batch), losses = values(args), []
    for _ in range(3):
        w, loss = step(w, *batch)
        losses.append(float(loss))
    assert losses[2] < losses[0]
    return np.asarray(w), losses


def test_blocks_take_less_memory_and_time():
    plan = jaxmem.schedule(make_step(), **HOW).plan(*shapes())
    copies = GROUPS * ROWS * WIDTH * 4
    assert plan.plain.temp_bytes > copies > plan.scheduled.temp_bytes
    assert plan.scheduled.seconds < plan.plain.seconds
    assert "ragged_dot products in blocks of rows" in str(plan)
    # no prediction of the scheduled step has the copies
    assert plan.predicted_bytes < 1.2 * plan.scheduled.peak_bytes


@pytest.mark.slow
def test_a_step_trains_alike_in_blocks():
    step, args = make_step(), shapes()
    w, losses = trained(jaxmem.schedule(step, **HOW), args)
    plain, wanted = trained(jax.jit(step), args)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    np.testing.assert_allclose(w, plain, rtol=1e-4, atol=1e-6)


def mapped(mesh):
    one = lambda x, w, sizes: experts(x, w, sizes[0])
    specs = P("data"), P(), P("data")
    return jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P("data"))


@pytest.mark.slow
def test_inside_of_a_shard_map_each_device_has_blocks_of_its_rows():
    mesh = jaxmem.target_mesh("h100", (4,), ("data",))
    args = shapes(mesh, P("data"), (4, GROUPS), 4 * ROWS)
    plan = jaxmem.schedule(make_step(mapped(mesh)), **HOW).plan(*args)
    assert plan.scheduled.temp_bytes < GROUPS * ROWS * WIDTH * 4
    here = jax.make_mesh((4,), ("data",), AUTO)
    args = shapes(here, P("data"), (4, GROUPS))
    step = make_step(mapped(here))
    w, losses = trained(jaxmem.schedule(step, **HOW), args)
    plain, wanted = trained(jax.jit(step), args)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    np.testing.assert_allclose(w, plain, rtol=1e-4, atol=1e-6)


def test_lint_tells_of_the_copies_on_a_gpu_alone():
    step, args = make_step(), shapes()
    (found, *_) = jaxmem.lint(step, *args, target="h100").of("ragged copies")
    assert found.bytes == found.count * GROUPS * ROWS * WIDTH * 4
    assert "jaxmem.schedule" in found.remedy
    assert not jaxmem.lint(step, *args).of("ragged copies")
