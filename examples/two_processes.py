"""A GPT under FSDP in two processes: one search, micro-batches, a restart.

    python examples/two_processes.py

starts both on this machine's CPU, kills one of them in the middle, and starts the job
again from its last checkpoint. On a cluster, one starts `train` once a host.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.demo import data, models
from jaxmem.demo.settings import Settings

SIZE = Settings(model="linen", layers=4, width=32, heads=2, context=64, batch=16)
DEVICES = 4  # in all processes together
EVERY = 2  # steps from one checkpoint to the next


def sharded(mesh, shape) -> NamedSharding:
    """Over the last axis that all devices divide; else a copy on each device."""
    fits = [i for i, size in enumerate(shape) if size % DEVICES == 0]
    names = [
        "fsdp" if i == max(fits, default=None) else None for i in range(len(shape))
    ]
    return NamedSharding(mesh, P(*names))


def start(mesh):
    """Parameters, optimizer state, and the scheduled step."""
    model = models.build(SIZE)
    params, forward = models.split(model, SIZE)
    place = lambda x: sharded(mesh, x.shape)
    params = jax.tree.map(lambda x: np.asarray(x), params)
    params = jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, place(x), x.__getitem__), params
    )

    def loss(params, tokens, rng):
        logits = forward(params, tokens[:, :-1])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return each.mean()

    tx = optax.adamw(1e-3)
    shapes = jax.eval_shape(tx.init, params)
    state = jax.jit(tx.init, out_shardings=jax.tree.map(place, shapes))(params)
    step = jaxmem.microbatch(loss, tx, 2)
    # Process 0 searches for what fits the budget, and the others take its plan.
    step = jaxmem.schedule(step, "4MiB", donate_argnums=(0, 1), progress=False)
    return params, state, step


def train(folder: Path, steps: int, kill_at: int | None) -> None:
    """What each process runs, from the last checkpoint on if there is one."""
    mesh = jax.make_mesh((DEVICES,), ("fsdp",), (jax.sharding.AxisType.Auto,))
    params, state, step = start(mesh)
    saved = ocp.CheckpointManager(
        folder / "checkpoints",
        options=ocp.CheckpointManagerOptions(save_interval_steps=EVERY, max_to_keep=2),
    )
    first = 0
    if saved.latest_step() is not None:
        first = saved.latest_step() + 1
        like = ocp.args.StandardRestore((params, state))
        params, state = saved.restore(saved.latest_step(), args=like)
    batches = data.batches(
        data.standard_library().train, SIZE.batch, SIZE.context, SIZE.seed
    )
    rows = NamedSharding(mesh, P("fsdp"))
    for number in range(steps):
        batch = next(batches)  # the same batches after a restart
        if number < first:
            continue
        if number == kill_at and jax.process_index() == 1:
            os._exit(9)
        tokens = jax.make_array_from_callback(batch.shape, rows, batch.__getitem__)
        params, state, metrics = step(params, state, tokens, None)
        if jax.process_index() == 0:
            print(f"step {number}: loss {float(metrics['loss']):.6f}", flush=True)
        saved.save(number, args=ocp.args.StandardSave((params, state)))
    saved.wait_until_finished()
    saved.close()
    plan = step.plan(params, state, tokens, None)
    found = f"{len(plan.tried)} compiles in {plan.planning_seconds:.6f} s"
    print(f"process {jax.process_index()}: plan found by {found}", flush=True)


def main() -> None:
    """Starts a job, and once more after one of its processes was killed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--kill-at", type=int, default=5)
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--folder", type=Path)
    options.add_argument("--worker", nargs=2, help="process and port; for main itself")
    given = options.parse_args()
    if given.worker is not None:
        process, port = map(int, given.worker)
        if given.processes > 1:
            jax.distributed.initialize(
                f"localhost:{port}",
                given.processes,
                process,
                heartbeat_timeout_seconds=10,  # the others detect that one has exited
            )
        train(given.folder, given.steps, given.kill_at if given.kill_at >= 0 else None)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        if run(given, folder, given.kill_at) == 0:
            return
        print("a process has ended: once more, from the last checkpoint", flush=True)
        sys.exit(run(given, folder, -1))


def run(given, folder: Path, kill_at: int) -> int:
    """Starts the processes of a job, and waits for them: how the first one ended."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    count = DEVICES // given.processes
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
    }
    own = [sys.executable, __file__, "--folder", str(folder)]
    own += ["--steps", str(given.steps), "--kill-at", str(kill_at)]
    own += ["--processes", str(given.processes)]
    folder.mkdir(parents=True, exist_ok=True)
    jobs = []
    for i in range(given.processes):
        with open(folder / f"process{i}.log", "ab") as log:  # what jax and orbax print
            command = [*own, "--worker", str(i), str(port)]
            jobs.append(subprocess.Popen(command, env=environment, stderr=log))
    return max(abs(job.wait()) for job in jobs)


if __name__ == "__main__":
    main()
