"""FSDP in two processes: one search, AdamA in 8 bits, a kill and a restart.

    python examples/two_processes.py

starts both on this machine's CPU, kills one of them in the middle, and starts the job
again from its last checkpoint, under the same plan. On a cluster, one starts `work`
once a host, with a folder that all of them see.
"""

import argparse
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.demo import data
from jaxmem.scheduling import Plan

LAYERS, WIDTH, BATCH, TOKENS = 4, 64, 16, 64
DEVICES = 4  # in all processes together
MICRO_BATCHES = 2
OPTIMIZER = jaxmem.optim.adama(1e-3, micro_batches=MICRO_BATCHES, bits=8)
BUDGET = "1.6MiB"  # a device
EVERY = 2  # steps from one checkpoint to the next
HEARTBEAT = 10  # seconds without a sign of life after which a process counts as dead
SHUTDOWN = 60  # seconds for which a process that has ended waits for the others


def make_state():
    """Parameters and optimizer state."""
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda key, *shape: 0.05 * jax.random.normal(key, shape)
    params = {
        "table": draw(keys[0], 256, WIDTH),
        "up": draw(keys[1], LAYERS, WIDTH, 4 * WIDTH),
        "down": draw(keys[2], LAYERS, 4 * WIDTH, WIDTH),
    }
    return params, OPTIMIZER.init(params)


def spec_of(x):
    """Rows of matrices are spread: with them go the 8-bit codes and their scales."""
    return P(*[None] * (x.ndim - 2), "fsdp") if x.ndim > 1 else P()


def loss_fn(params, tokens, rng, examples):
    keep = functools.partial(jax.lax.with_sharding_constraint, shardings=examples)

    def layer(x, params):
        before = jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None]
        hidden = jax.nn.gelu(before @ params["up"])
        return keep(x + hidden @ params["down"]), None

    layers = {name: params[name] for name in ("up", "down")}
    x, _ = jax.lax.scan(layer, keep(params["table"][tokens[:, :-1]]), layers)
    logits = x @ params["table"].T
    each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return each.mean()


def scheduled(arguments, examples, path: Path):
    """The step and its plan: of an earlier start, or what process 0 finds for all."""
    loss = functools.partial(loss_fn, examples=examples)
    step = jaxmem.microbatch(loss, OPTIMIZER, MICRO_BATCHES)
    how = {"donate_argnums": (0, 1), "progress": False}
    if path.exists():
        plan = Plan.from_json(path.read_text())
        return jaxmem.schedule(step, plan=plan, **how), plan
    step = jaxmem.schedule(step, BUDGET, **how)
    # all ask for it: none waits for long in the first step
    plan = step.plan(*arguments)
    if jax.process_index() == 0:
        part = path.with_suffix(".part")
        part.write_text(plan.to_json())
        part.replace(path)  # the whole plan or none, whenever a process is killed
    return step, plan


def train(folder: Path, steps: int, kill: tuple[int, int] | None) -> None:
    """What each process runs, from the last checkpoint on if there is one."""
    process = jax.process_index()
    mesh = jax.make_mesh((DEVICES,), ("fsdp",), (jax.sharding.AxisType.Auto,))
    examples = NamedSharding(mesh, P("fsdp"))
    place = lambda x: NamedSharding(mesh, spec_of(x))
    where = jax.tree.map(place, jax.eval_shape(make_state))
    params, opt_state = jax.jit(make_state, out_shardings=where)()
    shape = (BATCH, TOKENS + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=examples)
    arguments = params, opt_state, tokens, None
    step, plan = scheduled(arguments, examples, folder / "plan.json")
    saved = ocp.CheckpointManager(
        folder / "checkpoints",
        options=ocp.CheckpointManagerOptions(save_interval_steps=EVERY, max_to_keep=2),
    )
    last = saved.latest_step()  # of those that all processes have written to the end
    if last is not None:
        like = ocp.args.StandardRestore((params, opt_state))
        params, opt_state = saved.restore(last, args=like)
    batches = data.batches(data.standard_library().train, BATCH, TOKENS, 0)
    for number in range(steps):
        batch = next(batches)  # the same batches after a restart
        if last is not None and number <= last:
            continue
        if kill == (process, number):
            os.kill(os.getpid(), signal.SIGKILL)
        tokens = jax.make_array_from_callback(shape, examples, batch.__getitem__)
        params, opt_state, metrics = step(params, opt_state, tokens, None)
        loss = float(metrics["loss"])  # here a process waits for the others
        if process == 0:
            print(f"step {number}: loss {loss!r}", flush=True)
        saved.save(number, args=ocp.args.StandardSave((params, opt_state)))
    saved.wait_until_finished()
    saved.close()
    found = f"{len(plan.tried)} compiles in {plan.planning_seconds:.6f} s"
    print(f"process {process}: plan {plan.fingerprint}, {found}", flush=True)


def work(given) -> None:
    """One process of the job."""
    process, port = map(int, given.worker)
    if given.processes > 1:
        jax.distributed.initialize(
            f"localhost:{port}",
            given.processes,
            process,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=SHUTDOWN,
        )
    try:
        train(given.folder, given.steps, given.kill[0] if given.kill else None)
    except Exception as error:
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"process {process} has failed: {line}", flush=True)
        traceback.print_exc()
        # If another process is gone, jax names it meanwhile and ends this one. If not,
        # the others say what they have met: they end as soon as process 0 is gone.
        time.sleep(2 * HEARTBEAT)
        os._exit(1)  # not by way of `shutdown`, which waits longer


def a_kill(text: str) -> tuple[int, int]:
    process, step = map(int, text.split(":"))
    return process, step


def main() -> None:
    """Starts a job, and once more after each kill of one of its processes."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--kill", type=a_kill, nargs="*", default=[(1, 5)])
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--folder", type=Path)
    options.add_argument("--worker", nargs=2, help="process and port; for main itself")
    given = options.parse_args()
    if given.worker is not None:
        work(given)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        for kill in given.kill:  # as PROCESS:STEP, one for each start but the last
            if run(given, folder, kill):
                return
            print("once more, from the last checkpoint", flush=True)
        sys.exit(not run(given, folder, None))


def run(given, folder: Path, kill: tuple[int, int] | None) -> bool:
    """Starts the processes of a job, and waits for them: whether none has failed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    count = DEVICES // given.processes
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
    }
    own = [sys.executable, __file__, "--folder", str(folder)]
    own += ["--steps", str(given.steps), "--processes", str(given.processes)]
    own += ["--kill", *([] if kill is None else [f"{kill[0]}:{kill[1]}"])]
    folder.mkdir(parents=True, exist_ok=True)
    jobs = {}
    for i in range(given.processes):
        with open(folder / f"process{i}.log", "ab") as log:  # what jax and orbax print
            command = [*own, "--worker", str(i), str(port)]
            jobs[i] = subprocess.Popen(command, env=environment, stderr=log)
    return all_done(jobs)


def all_done(jobs: dict[int, subprocess.Popen]) -> bool:
    """Waits for all; says of each that failed how, and how long after the first."""
    left, first = dict(jobs), None
    while left:
        time.sleep(0.1)
        for i in [i for i, job in left.items() if job.poll() is not None]:
            code = left.pop(i).returncode
            if code == 0:
                continue
            first = first or time.monotonic()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            after = f"{time.monotonic() - first:.1f} s after the first"
            print(f"process {i} ended by {how}, {after}", flush=True)
    return first is None


if __name__ == "__main__":
    main()
