"""What devices send each other, by the text of compiled modules."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.memory import MemoryReport
from jaxmem.memory.buffers import collectives_of, parse_hlo, sent_bytes

N, LAYERS, WIDTH = 8, 3, 16


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((N,), ("data",), (jax.sharding.AxisType.Auto,))


def mapped(mesh, body, out):
    return jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=out)


def looped(body):
    """`body` once in each iteration of a loop."""
    run = lambda x: lax.fori_loop(0, LAYERS, lambda _, y: body(y), x)
    return run


BYTES = WIDTH * WIDTH * 4  # of a shard
CASES = {
    "all-reduce": (
        looped(lambda x: lax.pcast(lax.psum(x, "data"), "data", to="varying")),
        2 * BYTES * (N - 1) / N,
    ),
    "all-gather": (
        looped(lambda x: lax.all_gather(x, "data", tiled=True)[:WIDTH] + x),
        BYTES * (N - 1),
    ),
    "reduce-scatter": (
        looped(lambda x: jnp.tile(lax.psum_scatter(x, "data", tiled=True), (N, 1))),
        BYTES * (N - 1) / N,
    ),
    "all-to-all": (
        looped(lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True)),
        BYTES * (N - 1) / N,
    ),
    "collective-permute": (
        looped(lambda x: lax.ppermute(x, "data", [(i, (i + 1) % N) for i in range(N)])),
        BYTES,
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_each_kind_in_a_loop(mesh, kind):
    body, sent = CASES[kind]
    x = jnp.ones((N * WIDTH, WIDTH))
    text = jax.jit(mapped(mesh, body, P("data"))).lower(x).compile().as_text()
    (one,) = collectives_of(parse_hlo(text))
    # a permutation tells pairs of devices, and no group
    devices = 2 if kind == "collective-permute" else N
    assert (one.kind, one.devices, one.times) == (kind, devices, LAYERS)
    assert one.sent == LAYERS * sent
    assert "test_collectives.py" in one.source


def test_a_loop_that_does_not_say_how_often_it_runs(mesh):
    def body(x):
        more = lambda x: lax.psum(x.sum(), "data") < 1e9
        return lax.while_loop(more, lambda x: 2 * x, x)

    x = jnp.ones((N * WIDTH, WIDTH))
    text = jax.jit(mapped(mesh, body, P("data"))).lower(x).compile().as_text()
    found = collectives_of(parse_hlo(text))
    assert found and {one.times for one in found} == {0}
    assert sent_bytes(found) == 0


def reduced(mesh):
    """A step of data parallelism, its arguments, and bytes of its parameters."""

    def step(w, x):
        return w - jax.grad(lambda w: jnp.square(jnp.tanh(x @ w)).sum())(w)

    spread = lambda shape, spec: jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(mesh, spec)
    )
    return step, (spread((WIDTH, WIDTH), P()), spread((64, WIDTH), P("data")))


def test_a_report_shows_them(mesh):
    step, args = reduced(mesh)
    report = jaxmem.estimate(step, *args, donate_argnums=0)
    wanted = int(2 * BYTES * (N - 1) / N)
    assert report.sent_bytes == wanted
    assert f"Between devices: a device sends {wanted / 1024:.2f} KiB" in str(report)
    assert MemoryReport.from_json(report.to_json()) == report
    assert "Between devices" in report._repr_html_()
    totals = report.compare(report).sections
    assert totals["sent by a device in a step"][0].cells()[0] == "all-reduce"


def test_nothing_is_shown_on_one_device():
    report = jaxmem.estimate(jnp.tanh, jnp.ones(8))
    assert report.collectives == () and "Between devices" not in str(report)
    assert "sent by a device in a step" not in report.compare(report).sections


GROUPS = {
    "replica_groups=[2,4]<=[8]": 4,
    "replica_groups={{0,1},{2,3},{4,5},{6,7}}": 2,
    "replica_groups=mesh['a'=2,'b'=4] {'b'}": 4,
    "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}": 2,
    "replica_groups=mesh['a'=2,'b'=4] {'a', 'b'}": 8,
    "replica_groups=mesh['a'=8] {'a':(2)4}": 4,
    "replica_groups={}": 8,
}


@pytest.mark.parametrize("groups", GROUPS)
def test_groups_of_devices(groups):
    """As XLA writes them; devices of a mesh may be in another order than their ids."""
    text = f"""HloModule step, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

ENTRY %main (p: f32[16]) -> f32[16] {{
  %p = f32[16]{{0}} parameter(0)
  ROOT %all = f32[16]{{0}} all-reduce(%p), {groups}, to_apply=%add
}}
"""
    (one,) = collectives_of(parse_hlo(text))
    assert one.devices == GROUPS[groups]
