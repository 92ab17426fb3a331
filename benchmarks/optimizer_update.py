"""What an update alone takes: predicted milliseconds and temporaries, by optimizer.

    python -m benchmarks.optimizer_update          # every one
    python -m benchmarks.optimizer_update lion     # rows with this word; others stay

Weights, gradients and state of Llama-1B's sizes (`benchmarks.ledger`), all donated, on
an H100, each optimizer with the name that it has in `benchmarks.optimizer_training`.
Bytes a parameter are those of one step: all gradients are there at once, as they are
without `jaxmem.schedule`.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._common import MIB, milliseconds, publish_some
from benchmarks.ledger import MODELS, shapes
from benchmarks.optimizer_training import BF16, OPTIMIZERS

TARGET, MODEL, RATE = "h100", "Llama-1B", 1e-3
# those that need no names of the demonstration's parameters
FAMILIES = "adamw", "lion", "schedule-free", "came", "adafactor", "adalomo", "lomo"
FAMILIES += "sm3", "adam-mini"
NAMES = [
    name
    for name in OPTIMIZERS
    if name.startswith(FAMILIES) and name not in ("adamw-host",)
]
PARTS = "weights", "gradients", "state"
COLUMNS = ("optimizer", *PARTS, "bytes a parameter", "temp MiB", "predicted ms")


def measure(name: str) -> list[float]:
    tx = OPTIMIZERS[name].make(RATE)
    params = shapes(MODELS[MODEL], jnp.bfloat16 if BF16 in name else jnp.float32)

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = params, jax.eval_shape(tx.init, params), params
    report = jaxmem.estimate(update, *args, target=TARGET, donate_argnums=(0, 1, 2))
    found = jaxmem.ledger(params, tx)
    held = [found.bytes_of(part) for part in PARTS[:2]]
    held.append(found.device_bytes - sum(held))
    each = [found.per_parameter(x) for x in (*held, found.device_bytes)]
    return [*each, report.temp_bytes / MIB, milliseconds(report)]


if __name__ == "__main__":
    rows = {(name,): functools.partial(measure, name) for name in NAMES}
    publish_some("optimizer_update", COLUMNS, rows, sys.argv[1:])
