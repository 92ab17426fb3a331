"""AdamA in two processes, which share a mesh of eight CPU devices."""

import functools
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.optim import accumulate_step, adama, apply_step, start_step

ROOT = pathlib.Path(__file__).parents[2]
PROCESSES, DEVICES, N = 2, 8, 2
SPECS = {"data parallel": P(), "fsdp": P("data")}
# As in test_distributed.py, with shorter sums.
ROUNDING = 1e-12


def loss(params, batch, rng=None):
    del rng
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return jnp.mean(jnp.square(hidden @ params["v"] - batch["y"]))


def values():
    """(params, batches) in NumPy, the same in every process."""
    r = np.random.default_rng(0)
    params = {"w": r.standard_normal((8, 16)), "v": r.standard_normal((16, 4))}
    shapes = {"x": (3, 32, 8), "y": (3, 32, 4)}
    batches = {name: r.standard_normal(shape) for name, shape in shapes.items()}
    return params, [{k: b[i] for k, b in batches.items()} for i in range(3)]


def put(mesh, tree, spec):
    """As a global array, of which a process makes its own part."""
    sharding = NamedSharding(mesh, spec)
    make = lambda x: jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
    return jax.tree.map(make, tree)


def with_jit(mesh, spec):
    """Parameters after three steps of sharded jit."""
    params, batches = values()
    tx = adama(1e-2, weight_decay=0.1, micro_batches=N)
    step = jaxmem.microbatch(loss, tx, N)
    params = put(mesh, params, spec)
    state = tx.init(params)
    for batch in batches:
        params, state, _ = step(params, state, put(mesh, batch, P("data")), None)
    return params


def with_shard_map(mesh):
    """The same with gradients that stay on their devices."""
    tx = adama(1e-2, weight_decay=0.1, axis_name="data")

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P()
    )
    def step(params, state, batch):
        state, local = start_step(state, params, "data")

        def micro(state, batch):
            grads = jax.grad(loss)(local, batch)
            return accumulate_step(tx, grads, state, params, micro_batches=N), None

        batch = jax.tree.map(lambda x: x.reshape(N, -1, *x.shape[1:]), batch)
        state, _ = jax.lax.scan(micro, state, batch)
        updates, state = apply_step(tx, state, params)
        return optax.apply_updates(params, updates), state

    params, batches = values()
    params = put(mesh, params, P())
    state = tx.init(params)
    for batch in batches:
        params, state = step(params, state, put(mesh, batch, P("data")))
    return params


def results():
    """Named arrays, whole, of this process and whatever others there are."""
    types = (AxisType.Auto,)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=types)
    trained = {name: with_jit(mesh, spec) for name, spec in SPECS.items()}
    trained["shard_map"] = with_shard_map(mesh)
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
    return {
        f"{how} {name}": np.asarray(whole(x).addressable_data(0))
        for how, params in trained.items()
        for name, x in params.items()
    }


def main(port: str, process: str, path: str) -> None:
    """What each of the processes runs."""
    jax.distributed.initialize(f"localhost:{port}", PROCESSES, int(process))
    assert jax.device_count() == DEVICES
    assert jax.local_device_count() == DEVICES // PROCESSES
    np.savez(path, **results())
    jax.distributed.shutdown()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start(port: int, process: int, path: pathlib.Path) -> subprocess.Popen:
    count = DEVICES // PROCESSES
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
    }
    arguments = [str(port), str(process), str(path)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.optim.test_processes", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    port = free_port()
    paths = [tmp_path / f"{i}.npz" for i in range(PROCESSES)]
    running = [start(port, i, path) for i, path in enumerate(paths)]
    try:
        with jax.enable_x64(True):
            want = results()
        said = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, text in zip(running, said, strict=True):
        assert process.returncode == 0, text
    before = values()[0]
    for path in paths:
        got = np.load(path)
        assert set(got) == set(want)
        for name, x in want.items():
            assert np.abs(got[name] - x).max() <= ROUNDING * np.abs(x).max(), name
            assert np.abs(x - before[name[-1]]).max() > 1e-2, name


if __name__ == "__main__":
    main(*sys.argv[1:])
