"""One exact Adam step of BERT-Large, as XLA compiles it and through `jaxmem.schedule`.

    python -m benchmarks.release             # gradient release
    python -m benchmarks.release h100        # rows that have it; others stay
    python -m benchmarks.release --residuals # the loss gradient at S 512
    python -m benchmarks.release --unrolled  # order: 16 dense layers in a Python loop

24 layers in `nn.scan`, batch 8 of 128 tokens, dropout 0.1, bf16 compute, f32
parameters and moments, all donated: 3,823 MiB of state. "predicted ms" is
`report.seconds`.
"""

import argparse
import functools
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks import bert
from benchmarks._common import (
    MIB,
    TARGETS,
    publish,
    publish_some,
    result_of,
    size_and_ms,
)
from benchmarks.models.transformers import (
    Bert,
    BertConfig,
    Layer,
    abstract_params,
    masked_loss,
)
from benchmarks.steps.train import train_step

TOKENS = jax.ShapeDtypeStruct((8, 128), jnp.int32)
KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)

# (remat, substituted, target) -> the most MiB of peak
PEAKS = {
    (True, False, "h100"): 4100,
    (True, True, "h100"): 4020,
    (True, False, "tpu-v5e"): 4460,
    (True, True, "tpu-v5e"): 4460,
}
TEMPS = {(False, True, "h100"): 800}


def model(remat: bool, substituted: bool):
    """BERT-Large, its layer rematerialised or not, plain or lean."""
    made = Bert(BertConfig(), layer=nn.remat(Layer) if remat else Layer)
    return jaxmem.substitute(made) if substituted else made


def adam_step(model, tx=None, dtype=None):
    """A train step as a user writes it, and its arguments; `dtype` of parameters."""
    tx, loss = tx or optax.adam(1e-3), masked_loss(model)
    of_words = lambda p, x, key: loss(p, x, jax.random.wrap_key_data(key))
    params = abstract_params(model, TOKENS)
    if dtype is not None:
        cast = lambda x: jax.ShapeDtypeStruct(x.shape, dtype)
        params = jax.tree.map(cast, params)
    state = params, jax.eval_shape(tx.init, params)
    return train_step(of_words, tx), (state, TOKENS, KEY)


def cases():
    """(remat, substituted, target) of every row."""
    for remat in (True, False):
        for substituted in (False, True):
            for target in TARGETS:
                yield remat, substituted, target


def measure(remat: bool, substituted: bool, target: str):
    """Reports of the step as it is, and scheduled."""
    step, args = adam_step(model(remat, substituted))
    plain = jax.jit(step, donate_argnums=0)
    scheduled = jaxmem.schedule(step, donate_argnums=0)
    return [jaxmem.estimate(fn, *args, target=target) for fn in (plain, scheduled)]


def row(*case) -> tuple:
    plain, ours = measure(*case)
    threshold = PEAKS.get(case) or TEMPS.get(case)
    value = ours.peak_bytes if case in PEAKS else ours.temp_bytes
    return (
        *(plain.temp_bytes / MIB, *size_and_ms(plain, "peak_bytes")),
        *(ours.temp_bytes / MIB, *size_and_ms(ours, "peak_bytes")),
        f"{'peak' if case in PEAKS else 'temp'} {threshold}" if threshold else "",
        result_of(value / MIB, threshold),
    )


def release(words: Sequence[str]) -> None:
    rows = {
        ("a layer" if remat else "none", "yes" if lean else "no", target): (
            functools.partial(row, remat, lean, target)
        )
        for remat, lean, target in cases()
    }
    figures = ("temp MiB", "peak MiB", "predicted ms")
    columns = [f"{who}: {what}" for who in ("XLA", "scheduled") for what in figures]
    columns = ("remat", "substituted", "target", *columns, "at most", "met")
    publish_some("release", columns, rows, words)


def residual_row(fn, args, target: str) -> tuple:
    return size_and_ms(jaxmem.estimate(fn, *args, target=target))


def residuals(words: Sequence[str]) -> None:
    """What the backward scan makes itself: the loss gradient, nothing to release."""
    step, args = bert.gradient(model(False, True))
    variants = ("substituted", step), ("scheduled too", scheduled(step))
    rows = {
        (name, target): functools.partial(residual_row, fn, args, target)
        for target in TARGETS
        for name, fn in variants
    }
    columns = ("model", "target", "temp MiB", "predicted ms")
    publish_some("release_residuals", columns, rows, words)


def scheduled(step):
    """Scheduled with nothing donated, as a loss gradient is."""
    return jaxmem.schedule(step, donate_argnums=())


def dense_step(layers: int = 16, width: int = 4096, batch: int = 256):
    """Adam on dense layers in a Python loop."""
    tx = optax.adam(1e-3)

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(params, moments, x):
        grads = jax.grad(loss)(params, x)
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    return step, (params, jax.eval_shape(tx.init, params), x)


def unrolled_row(target: str) -> list[float]:
    """MiB of temporaries and ms of the step as it is, and scheduled."""
    step, args = dense_step()
    plain = jax.jit(step, donate_argnums=(0, 1))
    ours = jaxmem.schedule(step, donate_argnums=(0, 1))
    reports = (jaxmem.estimate(fn, *args, target=target) for fn in (plain, ours))
    return [x for report in reports for x in size_and_ms(report)]


def unrolled() -> None:
    rows = [(target, *unrolled_row(target)) for target in TARGETS]
    columns = ("target", "XLA: temp MiB", "XLA: predicted ms", "scheduled: temp MiB")
    columns += ("scheduled: predicted ms",)
    publish("release_unrolled", columns, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--residuals", action="store_true")
    parser.add_argument("--unrolled", action="store_true")
    chosen = parser.parse_args()
    if chosen.residuals:
        residuals(chosen.words)
    elif chosen.unrolled:
        unrolled()
    else:
        release(chosen.words)
