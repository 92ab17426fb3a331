"""N micro-batches of BERT-Large: what accumulating takes, by every method there is.

    python -m benchmarks.accumulation
    python -m benchmarks.accumulation microbatch h100    # rows that have both

Micro-batches of 8 x 128 tokens, remat a layer, bf16 compute, f32 parameters (1,274
MiB) and moments, all donated (3,823 MiB of state). `optax.MultiSteps` is compiled for
one of its calls; the others hold all N micro-batches in one step. "predicted ms" is
`report.seconds`: of `optax.MultiSteps` that of the call that updates.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._common import (
    MIB,
    RESULTS,
    publish_some,
    published,
    result_of,
    size_and_ms,
)
from benchmarks.models.transformers import abstract_params, masked_loss
from benchmarks.release import TOKENS, model
from benchmarks.steps.train import flat_step

COUNTS = {"h100": (1, 2, 4, 8, 32), "tpu-v5e": (1, 2, 4, 8, 32)}
PATIENCE = 3600  # seconds: a compile for TPU takes minutes, more on a busy machine
KEY = jax.eval_shape(lambda: jax.random.key(0))
LEAST = 4020  # MiB of peak for AdamA through microbatch
ACCUMULATOR = 1274  # MiB of one more tree of the parameters' size


def loss_of(model):
    loss = masked_loss(model)
    return lambda params, tokens, key: loss(params, tokens, key)


def split(tokens, key, n: int):
    return tokens.reshape(n, -1, tokens.shape[-1]), jax.random.split(key, n)


def multi_steps(loss, n: int):
    """`optax.MultiSteps`: one call a micro-batch."""
    tx = optax.MultiSteps(optax.adam(1e-3), n)

    step = flat_step(jax.value_and_grad(loss), tx)
    return jax.jit(step, donate_argnums=(0, 1)), tx, 1


def by_hand(loss, n: int):
    """Gradients added up in a `lax.scan`, as most JAX code has it."""
    tx = optax.adam(1e-3)

    def step(params, state, tokens, key):
        def add(total, batch):
            value, grads = jax.value_and_grad(loss)(params, *batch)
            return jax.tree.map(lambda t, g: t + g / n, total, grads), value

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, values = jax.lax.scan(add, zeros, split(tokens, key, n))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, values.mean()

    return jax.jit(step, donate_argnums=(0, 1)), tx, n


def with_refs(loss, n: int):
    """Cotangents added in place into references (`jax.vjp(...).with_refs`)."""
    tx = optax.adam(1e-3)

    def step(params, state, tokens, key):
        totals = jax.tree.map(lambda p: jax.new_ref(jnp.zeros_like(p)), params)

        def add(_, batch):
            value, pull = jax.vjp(lambda p: loss(p, *batch) / n, params)
            pull.with_refs(totals)(jnp.ones_like(value))
            return None, value

        _, values = jax.lax.scan(add, None, split(tokens, key, n))
        grads = jax.tree.map(jax.freeze, totals)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, values.sum()

    return jax.jit(step, donate_argnums=(0, 1)), tx, n


def adama_by_hand(loss, n: int):
    """AdamA in a `lax.scan`, as XLA alone compiles it."""
    tx = jaxmem.adama(1e-3)

    def step(params, state, tokens, key):
        def add(state, batch):
            value, grads = jax.value_and_grad(loss)(params, *batch)
            add = jaxmem.optim.accumulate_step
            return add(tx, grads, state, params, micro_batches=n), value

        state, values = jax.lax.scan(add, state, split(tokens, key, n))
        updates, state = jaxmem.optim.apply_step(tx, state, params)
        return optax.apply_updates(params, updates), state, values.mean()

    return jax.jit(step, donate_argnums=(0, 1)), tx, n


def adama(loss, n: int):
    """`jaxmem.microbatch` with AdamA."""
    tx = jaxmem.adama(1e-3)
    return jaxmem.microbatch(loss, tx, n), tx, n


def adam(loss, n: int):
    """`jaxmem.microbatch` with Adam: one accumulator, or none for n = 1."""
    tx = optax.adam(1e-3)
    return jaxmem.microbatch(loss, tx, n), tx, n


VARIANTS = {
    "optax.MultiSteps, Adam": multi_steps,
    "accumulation by hand, Adam": by_hand,
    "jax.vjp with_refs, Adam": with_refs,
    "AdamA in a scan": adama_by_hand,
    "microbatch, Adam": adam,
    "microbatch, AdamA": adama,
}


def threshold(variant: str, n: int, target: str) -> int | None:
    """The most MiB of peak that is asked for."""
    if target != "h100":
        return None
    if variant == "microbatch, AdamA" and n in (8, 32):
        return LEAST
    return LEAST + ACCUMULATOR if variant == "microbatch, Adam" and n > 1 else None


def step_of(variant: str, n: int, made=None):
    """The jitted step of a model, by default BERT-Large, and its arguments."""
    made = made or model(remat=True, substituted=False)
    step, tx, count = VARIANTS[variant](loss_of(made), n)
    params = abstract_params(made, TOKENS)
    state = jax.eval_shape(tx.init, params)
    tokens = jax.ShapeDtypeStruct((TOKENS.shape[0] * count, TOKENS.shape[1]), jnp.int32)
    return step, (params, state, tokens, KEY)


def measure(variant: str, n: int, target: str):
    step, args = step_of(variant, n)
    return jaxmem.estimate(step, *args, target=target, timeout=PATIENCE)


def row(variant: str, n: int, target: str) -> tuple:
    report = measure(variant, n, target)
    most, (peak, ms) = threshold(variant, n, target), size_and_ms(report, "peak_bytes")
    return report.temp_bytes / MIB, peak, ms, most or "", result_of(peak, most)


def main() -> None:
    rows = {
        (variant, str(n), target): functools.partial(row, variant, n, target)
        for target in COUNTS
        for variant in VARIANTS
        for n in COUNTS[target]
    }
    columns = ("variant", "N", "target", "temp MiB", "peak MiB", "predicted ms")
    publish_some("accumulation", (*columns, "at most", "met"), rows, sys.argv[1:])
    draw(
        [(r[0], int(r[1]), r[2], r[3], float(r[4])) for r in published("accumulation")]
    )


def draw(rows) -> None:
    """Peaks over N, a picture a target."""
    import matplotlib.pyplot as plt

    targets = list(dict.fromkeys(row[2] for row in rows))
    figure, axes = plt.subplots(
        1, len(targets), figsize=(6 * len(targets), 4.5), sharey=True, squeeze=False
    )
    ticks = COUNTS["h100"]
    for ax, target in zip(axes[0], targets, strict=True):
        for variant in VARIANTS:
            points = [(r[1], r[4]) for r in rows if r[0] == variant and r[2] == target]
            ax.plot(*zip(*points, strict=True), marker="o", label=variant)
        ax.set(
            title=target, xlabel="micro-batches a step", xscale="log", ylim=(0, None)
        )
        ax.set_xticks(ticks, [str(n) for n in ticks])
        ax.minorticks_off()
        ax.axhline(3823, color="grey", linewidth=0.8, linestyle=":")
        ax.text(ticks[0], 3790, "parameters and moments", va="top", fontsize=8)
    axes[0][0].set_ylabel("peak, MiB")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    path = RESULTS / f"accumulation-jax{jax.__version__}.png"
    figure.savefig(path, dpi=120)
    print(f"wrote {path.relative_to(RESULTS.parent.parent)}")


if __name__ == "__main__":
    main()
