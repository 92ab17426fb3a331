"""Rules in the fewest bytes a parameter, and the loss after 1,000 steps with them.

    python -m benchmarks.five_bytes                # every row; an hour on one core
    python -m benchmarks.five_bytes "Muon, 4-bit"  # rows with these words; others stay

Bytes are those of `jaxmem.ledger` for Llama-7B: weights, the gradients that are live at
once where `jaxmem.schedule` releases each layer's, and the optimizer's state. Loss is
that of the demo's byte GPT on the Python standard library's sources (2 layers of 64, 8
crops of 64 bytes a step), of data held out, in nats a byte, with the same settings.
Gradients are clipped by the norm of each layer, which a release allows. A row's rate is
the best of those half a decade apart, by seed 0: from where its rule starts, each way
until the loss is larger. "released" counts leaves whose gradient `jaxmem.schedule`
releases, of those stacked by the scan over layers.
"""

import functools
import sys
from collections.abc import Callable
from statistics import fmean
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxmem
from benchmarks._common import publish_some
from benchmarks.five_bytes_rules import GPT_LEAVES, LLAMA_LEAVES, RULES, Rule
from benchmarks.ledger import MODELS, shapes
from benchmarks.steps.train import train_step
from jaxmem.demo import Settings, data, training

LLAMA, SEEDS = "Llama-7B", (0, 1, 2)
STEPS, WARM_UP, HELD_OUT = 1000, 100, 64  # the last in crops of a batch
GPT = {"model": "linen", "layers": 2, "width": 64, "heads": 2, "context": 64}
GPT |= {"batch": 8, "steps": STEPS}
# grid of the rates: 1e-4 times a half-decade to a power
GRID = {i: float(f"{(1, 3)[i % 2]}e{i // 2 - 4}") for i in range(-2, 10)}
PARTS = "weights", "gradients", "state"
COLUMNS = ("optimizer", "rule", *PARTS, "bytes a parameter")
COLUMNS += ("all gradients", "with all gradients", "released", "rate")
COLUMNS += (*(f"seed {s}" for s in SEEDS), "mean")


class Training(NamedTuple):
    """What a row trains: its optimizer of a peak rate, its loss, where it starts."""

    optimizer: Callable[[Any], optax.GradientTransformation]
    loss: Callable[..., jax.Array]
    params: Any


def bytes_of(rule: Rule) -> list[float]:
    """Of Llama: weights, gradients, state, their sum; all gradients, the sum then."""
    params = shapes(MODELS[LLAMA], jnp.float32 if rule.wide else jnp.bfloat16)
    tx = rule.optimizer(1e-3, LLAMA_LEAVES)
    released = jaxmem.ledger(params, tx, released=LLAMA_LEAVES.stacked)
    whole = jaxmem.ledger(params, tx)
    each = [released.bytes_of(part) for part in PARTS[:2]]
    each += [released.device_bytes - sum(each), released.device_bytes]
    each += [whole.bytes_of("gradients"), whole.device_bytes]
    return [released.per_parameter(x) for x in each]


def of_gpt(rule: Rule, seed: int) -> Training:
    settings = Settings(**GPT, seed=seed)
    params, loss = training.pair(settings)["plain"]
    if not rule.wide:  # products in float32, as in the other rows
        wide = functools.partial(optax.tree.cast, dtype=jnp.float32)
        return Training(
            functools.partial(optimizer, rule),
            lambda params, tokens: loss(wide(params), tokens, None),
            optax.tree.cast(params, jnp.bfloat16),
        )
    narrow = lambda params, tokens: loss(params, tokens, None)
    return Training(functools.partial(optimizer, rule), narrow, params)


def optimizer(rule: Rule, peak: Any) -> optax.GradientTransformation:
    """Clipped by layers; the rate warms up, then falls by a cosine or stays."""

    def rate(count):
        t = count.astype(jnp.float32)
        down = (t - WARM_UP) / (STEPS - WARM_UP)
        down = 1.0 if rule.averages else 0.5 * (1 + jnp.cos(jnp.pi * down))
        return peak * jnp.where(t < WARM_UP, t / WARM_UP, down)

    clip = jaxmem.optim.clip_by_layer_norm(1.0, stacked=GPT_LEAVES.stacked)
    return optax.chain(clip, rule.optimizer(rate, GPT_LEAVES))


def step_of(of: Training, peak: Any) -> Callable:
    return train_step(of.loss, of.optimizer(peak))


def released(rule: Rule) -> str:
    """Of the leaves of the layers, those whose gradients `schedule` releases."""
    of = of_gpt(rule, SEEDS[0])
    state = of.params, of.optimizer(1e-3).init(of.params)
    step = jaxmem.schedule(step_of(of, 1e-3), donate_argnums=0)
    tokens = jax.ShapeDtypeStruct((GPT["batch"], GPT["context"] + 1), jnp.int32)
    plan, stacked = step.plan(state, tokens), len(jax.tree.leaves(of.params["blocks"]))
    return f"{sum(g.released for g in plan.gradients)} of {stacked}"


def trained(rule: Rule) -> Callable[[float, int], float]:
    """The loss of a peak rate and a seed; compiled once for all of them."""
    of = of_gpt(rule, SEEDS[0])

    @jax.jit
    def run(peak, params, crops, held_out):
        state = params, of.optimizer(peak).init(params)
        (params, kept), _ = lax.scan(step_of(of, peak), state, crops)
        if rule.averages:
            params = jaxmem.optim.schedule_free_eval_params(kept, params)
        return jnp.mean(lax.map(lambda tokens: of.loss(params, tokens), held_out))

    @functools.cache
    def loss(peak: float, seed: int) -> float:
        text = data.standard_library()
        arrays = crops(text.train, seed, STEPS), crops(text.validation, 0, HELD_OUT)
        found = float(run(peak, of_gpt(rule, seed).params, *arrays))
        print(f"    {peak:g}, seed {seed}: {found:.4f}", flush=True)
        return found if np.isfinite(found) else float("inf")

    return loss


def crops(text: Any, seed: int, count: int) -> np.ndarray:
    batches = data.batches(text, GPT["batch"], GPT["context"], seed)
    return np.stack([next(batches) for _ in range(count)])


def best_rate(loss: Callable[[float, int], float], start: float) -> float:
    """Of the grid, downhill from `start`; both neighbours of it are no better."""
    at = min(GRID, key=lambda i: abs(np.log(GRID[i] / start)))
    value = lambda i: loss(GRID[i], SEEDS[0]) if i in GRID else float("inf")
    while (best := min((at, at + 1, at - 1), key=value)) != at:
        at = best
    return GRID[at]


def measure(name: str) -> list:
    rule = RULES[name]
    print(name, flush=True)
    loss = trained(rule)
    rate = best_rate(loss, rule.start)
    losses = [loss(rate, seed) for seed in SEEDS]
    jax.clear_caches()
    cells = [rule.family, *bytes_of(rule), released(rule), f"{rate:g}"]
    return [*cells, *(f"{x:.4f}" for x in (*losses, fmean(losses)))]


if __name__ == "__main__":
    rows = {(name,): functools.partial(measure, name) for name in RULES}
    publish_some("five_bytes", COLUMNS, rows, sys.argv[1:])
