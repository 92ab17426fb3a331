"""What each optimizer trains to, beside the bytes of its state: the demo's GPT.

    python -m benchmarks.optimizer_training           # every one, three seeds
    python -m benchmarks.optimizer_training came      # this row; the others stay
    python -m benchmarks.optimizer_training --rates came   # the loss by learning rate

The demo's byte GPT on the Python standard library's sources (2 layers of 128, crops of
64 bytes, 100 steps). Losses are of data held out, nats a byte; state is in bytes a
parameter; matrices are small here, so codes and projectors weigh more than in a model
of a useful size (`benchmarks.ledger`). "bf16": weights, and so their gradients, in
bfloat16, with products in float32 as in the other rows.
"""

import dataclasses
import sys
from collections.abc import Callable
from statistics import fmean
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._common import as_a_whole, publish, published
from jaxmem.demo import Settings, data, training
from jaxmem.demo.optimizers import OPTIMIZERS
from jaxmem.optim import kahan_summation, split_master, stochastic_rounding

# weights in bfloat16: the rule -> what rounds them
NARROW = {
    "adamw-8bit": (stochastic_rounding, kahan_summation, split_master),
    "lion-8bit": (stochastic_rounding,),
    "schedule-free-8bit": (stochastic_rounding,),
}
BF16 = "bf16"


def narrow(name: str, wrap) -> tuple[str, Any]:
    known = OPTIMIZERS[name]
    make = lambda rate, **how: wrap(known.make(rate, **how))
    title = f"{name}, {BF16}, {wrap.__name__}"
    return title, dataclasses.replace(known, make=make)


OPTIMIZERS |= dict(narrow(name, wrap) for name, all_ in NARROW.items() for wrap in all_)
SEEDS = (0, 1, 2)
RATES = (0.3, 1.0, 3.0, 10.0, 30.0)
GPT = {"model": "linen", "layers": 2, "width": 128, "context": 64, "batch": 8}
STEPS, BATCHES = 100, 16


def train(name: str, seed: int) -> tuple[float, float]:
    """(validation loss, bytes of state a parameter)."""
    settings = Settings(**GPT, steps=STEPS, seed=seed, optimizer=name)
    params, loss = training.pair(settings)["plain"]
    if BF16 in name:
        params, loss = optax.tree.cast(params, jnp.bfloat16), computed_wide(loss)
    run = training.start(params, loss, settings, name)
    found = jaxmem.ledger(run.state[0], training.make_optimizer(settings, name))
    text = data.standard_library()
    crops = data.batches(text.train, settings.batch, settings.context, seed)
    training.train({"plain": run}, crops, settings)
    crops = data.batches(text.validation, settings.batch, settings.context, 0)
    parts = [found.bytes_of(part) for part in ("moments", "masters")]
    held = sum(parts) + found.host_bytes
    return training.validate(run, crops, BATCHES), found.per_parameter(held)


def computed_wide(loss: Callable) -> Callable:
    return lambda params, *batch: loss(optax.tree.cast(params, jnp.float32), *batch)


def by_rate(name: str) -> None:
    """Prints the loss of one seed for each learning rate."""
    known = OPTIMIZERS[name]
    for rate in RATES:
        OPTIMIZERS[name] = dataclasses.replace(known, rate=rate)
        print(
            f"{name}: {rate:g} times AdamW's rate: {train(name, 0)[0]:.4f}", flush=True
        )
        jax.clear_caches()


def main() -> None:
    rates = "--rates" in sys.argv
    chosen = [a for a in sys.argv[1:] if a != "--rates"] or list(OPTIMIZERS)
    if unknown := set(chosen) - set(OPTIMIZERS):
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(OPTIMIZERS)}")
    if rates:
        return [by_rate(name) for name in chosen] and None
    as_a_whole()
    new = {}
    for name in chosen:
        losses, held = zip(*(train(name, seed) for seed in SEEDS), strict=True)
        cells = (f"{OPTIMIZERS[name].rate:g}", *(f"{x:.4f}" for x in losses))
        new[name] = (name, *cells, f"{fmean(losses):.4f}", f"{held[0]:.2f}")
        print(*new[name], flush=True)
        jax.clear_caches()
    found = {row[0]: row for row in published("optimizer_training")} | new
    columns = ("optimizer", "rate", *(f"seed {s}" for s in SEEDS), "mean", "state B/p")
    rows = [found[name] for name in OPTIMIZERS if name in found]
    publish("optimizer_training", columns, rows)


if __name__ == "__main__":
    main()
