"""Steps that JAX partitions in calls back into Python, compiled for absent chips."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem._compat import partitions_in
from tests.memory.test_estimate import needs_h100

P = PartitionSpec
CUDNN = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
OURS = jaxmem.ops.dot_product_attention
WANTED = (0, 1, 2)


@pytest.fixture(params=["here", "absent"])
def mesh(request):
    if request.param == "absent":
        return jaxmem.target_mesh("h100", (2, 2, 2), ("d", "h", "s"))
    return jax.make_mesh((2, 2, 2), ("d", "h", "s"), axis_types=(AxisType.Auto,) * 3)


def sharded(mesh, shape, *spec, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def total(attend, q, k, v):
    return attend(q, k, v, is_causal=True).astype(jnp.float32).sum()


def gradient(attend):
    return jax.grad(functools.partial(total, attend), argnums=WANTED)


@needs_h100
@pytest.mark.parametrize("attend", [CUDNN, OURS], ids=["jax.nn", "jaxmem"])
def test_a_sharded_jit_takes_what_a_shard_map_takes(mesh, attend):
    q = sharded(mesh, (4, 512, 4, 64), "d", None, "h", None)
    step, spec = gradient(attend), P("d", None, "h")
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"d", "h", "s"}
    )
    a, b = (jaxmem.estimate(f, q, q, q, target="h100") for f in (step, mapped))
    # a few bytes for scalars
    assert a.temp_bytes == pytest.approx(b.temp_bytes, abs=1024)
    assert a.sent_bytes == 0
    alone = jax.ShapeDtypeStruct((2, 512, 2, 64), q.dtype)
    one = jaxmem.estimate(step, alone, alone, alone, target="h100")
    assert a.temp_bytes == pytest.approx(one.temp_bytes, abs=1024)


@needs_h100
def test_shardings_that_are_part_of_types():
    mesh = jax.make_mesh((4, 2), ("d", "h"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        q = sharded(mesh, (8, 512, 4, 64), "d", None, "h", None)
        typed = jaxmem.estimate(gradient(OURS), q, q, q, target="h100")
    alone = jax.ShapeDtypeStruct((2, 512, 2, 64), q.dtype)
    one = jaxmem.estimate(gradient(OURS), alone, alone, alone, target="h100")
    assert typed.temp_bytes == pytest.approx(one.temp_bytes, abs=1024)
    assert typed.sent_bytes == 0


@needs_h100
def test_checkpointed_layers_with_a_shard_map_are_partitioned():
    """There no operand's type names the mesh: the step's arguments do."""
    mesh = jaxmem.target_mesh("h100", (8,), ("d",))

    def layer(x, w):
        q, k, v = (y.reshape(8, 256, 2, 64) for y in jnp.split(x @ w, 3, -1))
        y = CUDNN(q, k, v, is_causal=True).reshape(x.shape)
        spread = {"mesh": mesh, "in_specs": P("d"), "out_specs": P("d")}
        return x + jax.shard_map(jnp.sin, **spread)(y)

    def loss(ws, x):
        for w in ws:
            x = jax.checkpoint(layer)(x, w)
        return x.astype(jnp.float32).sum()

    x = sharded(mesh, (8, 256, 128), "d")
    ws = [sharded(mesh, (128, 384), "d")] * 2
    report = jaxmem.estimate(jax.grad(loss), ws, x, target="h100")
    assert {c.kind for c in report.collectives} <= {"all-gather", "all-reduce"}


@needs_h100
def test_a_scan_of_layers_is_partitioned():
    mesh = jax.make_mesh((4, 2), ("d", "h"), axis_types=(AxisType.Auto,) * 2)

    def layer(x, w):
        b, t, d = x.shape
        q, k, v = (y.reshape(b, t, 4, 64) for y in jnp.split(x @ w, 3, -1))
        return x + CUDNN(q, k, v, is_causal=True).reshape(b, t, d), None

    loss = lambda w, x: jax.lax.scan(layer, x, w)[0].astype(jnp.float32).sum()
    w = sharded(mesh, (3, 256, 768), None, None, "h")
    x = sharded(mesh, (8, 256, 256), "d", None, None)
    scheduled = jaxmem.schedule(jax.grad(loss), target="h100")
    plan = scheduled.plan(w, x)
    plain = jaxmem.estimate(jax.grad(loss), w, x, target="h100")
    assert plan.scheduled.peak_bytes <= plain.peak_bytes
    # no scores: [2, 2, 256, 256] in float32 would be 1 MiB of each layer
    assert plain.temp_bytes < 3 * 2**20 + 6 * 2**20


@needs_h100
def test_a_rule_of_partitioning_of_the_users_own():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    @custom_partitioning
    def double(x):
        return 2 * x

    def partition(mesh, given, made):
        return mesh, lambda x: x + x, made.sharding, (given[0].sharding,)

    double.def_partition(partition, sharding_rule="i j -> i j")
    x = sharded(mesh, (1024, 1024), "d", None, dtype=jnp.float32)
    report = jaxmem.estimate(lambda x: double(jnp.sin(x)), x, target="h100")
    assert report.output_bytes == x.size * 4 // 8
    assert report.sent_bytes == 0


def test_a_program_without_such_calls_has_none():
    exported = jax.export.export(jax.jit(jnp.sin), platforms=["cuda"])(1.0)
    assert partitions_in(exported) == []


@pytest.mark.parametrize("checked", [True, False])
def test_splash_attention_in_a_shard_map(checked):
    """JAX asks how its results vary, which it does not say."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    q = sharded(mesh, (8, 512, 2, 128), "d", None, None, None)
    mapped = jax.shard_map(
        gradient(OURS), mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=checked
    )
    report = jaxmem.estimate(mapped, q, q, q, target="tpu-v5p")
    assert "splash" in str(report)
