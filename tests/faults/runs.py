"""What this version of jax makes of the programs on CPUs, as users have it: as JSON.

Run in a process of its own, since the tests turn XLA's optimizations down.
"""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.faults import programs

TRIPS, SMALL, LARGE = 2000, 2**12, 2**20


def wrong_elements(case) -> int:
    """Of a program beside itself, operation by operation."""
    found = jax.jit(case.step)(*case.args)
    with jax.disable_jit():
        wanted = case.step(*map(jnp.asarray, case.args))
    return int((np.asarray(found) != np.asarray(wanted)).sum())


def temporaries(case) -> int:
    compiled = jax.jit(case.step, donate_argnums=case.donate).lower(*case.args)
    return compiled.compile().memory_analysis().temp_size_in_bytes


def seconds(size: int) -> float:
    """Of a loop with the same iterations, over an array of this size."""
    step = lambda x: programs.recurrence(x, TRIPS)
    run = jax.jit(step, donate_argnums=0).lower(jnp.zeros(size)).compile()
    x, times = jnp.zeros(size), []
    for _ in range(4):
        start = time.perf_counter()
        x = jax.block_until_ready(run(x))
        times.append(time.perf_counter() - start)
    return min(times)


def error_of_reduced() -> float:
    """The largest error of a table's gradient, on 4 devices."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 16, (8, 16)).astype(np.int32)
    cotangents = rng.normal(size=(8, 16, 16)).astype(np.float32)
    wanted = np.zeros((64, 16), np.float32)
    np.add.at(wanted, ids, cotangents)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        args = (
            jax.device_put(jnp.zeros((64, 16)), P("model", None)),
            jax.device_put(ids, P(None, "model")),
            jax.device_put(cotangents, P(None, "model", None)),
        )
        found = jax.jit(jax.grad(programs.reduced_table))(*args)
    return float(np.abs(np.asarray(found) - wanted).max())


if __name__ == "__main__":
    found = {
        "moved": wrong_elements(programs.MOVED),
        "joined": wrong_elements(programs.JOINED),
        "between": temporaries(programs.BETWEEN),
        "before": temporaries(programs.BEFORE_LOOP),
        "slower": seconds(LARGE) / seconds(SMALL),
        "reduced": error_of_reduced(),
    }
    print(json.dumps(found))
