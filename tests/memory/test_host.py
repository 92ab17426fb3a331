"""Arguments and results in the host's memory: they are not counted on the device."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem import estimate, target_mesh
from tests.memory.test_estimate import needs_h100

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
SHAPE = 256, 256
BYTES = 4 * 256 * 256


def step(p, m):
    """The moments are fetched, and go back."""
    m = 0.9 * jax.device_put(m, DEVICE) + p
    return p - m, jax.device_put(m, HOST)


def arrays():
    p = jnp.ones(SHAPE)
    return p, jax.device_put(p, HOST)


@pytest.mark.fast("False")
@needs_h100
@pytest.mark.parametrize("full", [False, True])
def test_counted_on_the_host(full):
    report = estimate(step, *arrays(), target="h100", donate_argnums=(0, 1), full=full)
    assert report.host_bytes == BYTES
    assert report.argument_bytes == report.alias_bytes == BYTES
    # fetched moments, and new ones until they are sent
    assert BYTES <= report.temp_bytes <= 2 * BYTES + 2**12
    assert sum(row.bytes for row in report.at_peak) == report.peak_bytes
    names = [row.name for row in report.at_peak if row.kind == "argument"]
    assert [n for n in names if n] == ["p (donated)"]
    assert "in the host's memory 256 KiB" in str(report)


@needs_h100
def test_shapes_of_a_sharding_with_a_memory_kind():
    p, m = arrays()
    shape = jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=m.sharding)
    report = estimate(step, p, shape, target="h100", donate_argnums=(0, 1))
    assert report.host_bytes == BYTES


def test_on_the_cpu():
    """Where the host's memory is the device's too."""
    report = estimate(step, *arrays(), target="cpu", donate_argnums=(0, 1))
    assert report.argument_bytes + report.host_bytes == 2 * BYTES


def test_nothing_on_the_host():
    p, _ = arrays()
    assert estimate(lambda p: p + 1, p, target="cpu").host_bytes == 0


def sharded(mesh, kind=None):
    return NamedSharding(mesh, PartitionSpec("data"), memory_kind=kind)


@needs_h100
@pytest.mark.parametrize(
    "absent",
    [
        pytest.param(True, id="chips"),
        pytest.param(False, id="cpu devices", marks=pytest.mark.slow),
    ],
)
def test_each_of_several_devices_has_its_part(absent):
    """Shapes on a mesh of chips; arrays on as many devices of this process."""
    if absent:
        mesh = target_mesh("h100", (4,), ("data",))
        shape = lambda kind: jax.ShapeDtypeStruct(
            SHAPE, jnp.float32, sharding=sharded(mesh, kind)
        )
        args = shape(None), shape("pinned_host")
    else:
        devices = jax.devices()[:4]
        types = (AxisType.Auto,)
        mesh = jax.make_mesh((4,), ("data",), axis_types=types, devices=devices)
        p = jax.device_put(jnp.ones(SHAPE), sharded(mesh))
        args = p, jax.device_put(p, HOST)
    report = estimate(step, *args, target="h100", donate_argnums=(0, 1))
    assert report.host_bytes == BYTES // 4
    assert report.argument_bytes == report.alias_bytes == BYTES // 4
    assert report.temp_bytes <= 2 * BYTES // 4 + 2**12


def test_on_several_cpu_devices():
    """There both memories are the host's, and a device has its part of either."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    p = jax.device_put(jnp.ones(SHAPE), sharded(mesh))
    report = estimate(step, p, jax.device_put(p, HOST), donate_argnums=(0, 1))
    assert report.argument_bytes + report.host_bytes == 2 * BYTES // 8
