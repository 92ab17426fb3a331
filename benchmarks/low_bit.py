"""What steps with low-bit moments, split masters, and state on the host peak at.

    python -m benchmarks.low_bit             # everything
    python -m benchmarks.low_bit bert h100   # rows that have both words; others stay

BERT-Large, B 8 S 128, remat, as in `benchmarks.release`; and a Llama of 16 layers of
width 2048 (B 1 S 512, remat), whose peak is given in bytes a parameter. Scheduled, all
donated. With a split master parameters are bfloat16, else float32. "predicted ms" is
`report.seconds`.
"""

import functools
import math
import sys
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._common import MIB, publish_some, result_of, size_and_ms
from benchmarks.models.transformers import (
    LLAMA_1B,
    LlamaLayer,
    abstract_params,
    run_layers,
)
from benchmarks.release import adam_step, model
from benchmarks.steps.train import train_step
from jaxmem.optim import abstract_state, adama, adamw, on_host, split_master

VOCABULARY = 512  # so that the layers are what counts
LLAMA_TOKENS = jax.ShapeDtypeStruct((1, 512), jnp.int32)
MICRO_BATCHES = 8

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "AdamW, 8 bits": lambda: adamw(1e-3, bits=8),
    "AdamW, 8 bits, split master": lambda: split_master(adamw(1e-3, bits=8)),
    "AdamW, 4 bits, split master": lambda: split_master(adamw(1e-3, bits=4)),
    "AdamA, 8 bits, split master, 8 micro-batches": lambda: split_master(
        adama(1e-3, bits=8)
    ),
    "AdamW, 32 bits, moments on the host": lambda: adamw(1e-3, bits=32, on_host=True),
    "AdamW, 32 bits, split master, both on the host": lambda: on_host(
        split_master(adamw(1e-3, bits=32, on_host=True))
    ),
}
PLAIN, SPLIT, FOUR, ADAMA, HOST, SPLIT_HOST = OPTIMIZERS

# (model, optimizer, target) -> the most: MiB of BERT, bytes a parameter of Llama
CASES = {
    ("bert", PLAIN, "h100"): 2160.0,
    ("bert", PLAIN, "tpu-v5e"): 2200.0,
    ("bert", SPLIT, "h100"): 1820.0,
    ("llama", SPLIT, "h100"): 5.8,
    ("llama", FOUR, "h100"): 5.0,
    ("llama", ADAMA, "h100"): 5.8,
    ("bert", HOST, "h100"): 1560.0,
    ("bert", HOST, "tpu-v5e"): 1900.0,
    ("llama", HOST, "h100"): 4.8,
    ("llama", SPLIT_HOST, "h100"): 3.1,
}


class Llama(nn.Module):
    """Sixteen scanned layers and tied embeddings."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, LLAMA_1B.width, dtype=jnp.bfloat16, name="tokens")
        layer = nn.remat(LlamaLayer, prevent_cse=False)
        x = run_layers(layer, LLAMA_1B.layers, embed(tokens), LLAMA_1B)
        return embed.attend(nn.RMSNorm(dtype=jnp.bfloat16, name="norm")(x))


def llama_loss(params, tokens, rng=None):
    logits = Llama().apply({"params": params}, tokens).astype(jnp.float32)
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probs, tokens[..., None], -1).mean()


def cased(name: str, optimizer: str):
    """The scheduled step, its arguments, and its parameters."""
    tx = OPTIMIZERS[optimizer]()
    dtype = jnp.bfloat16 if "split" in optimizer else jnp.float32
    if name == "bert":
        step, args = adam_step(model(True, False), tx, dtype)
    else:
        cast = lambda x: jax.ShapeDtypeStruct(x.shape, dtype)
        params = jax.tree.map(cast, abstract_params(Llama(), LLAMA_TOKENS))
        step = train_step(llama_loss, tx)
        args = ((params, None), LLAMA_TOKENS)
    (params, _), *rest = args
    moments = abstract_state(tx, params)  # with the memory that they lie in
    args = ((params, moments), *rest)
    if optimizer == ADAMA:
        tokens = jax.ShapeDtypeStruct((MICRO_BATCHES, *LLAMA_TOKENS.shape[1:]), "int32")
        step = jaxmem.microbatch(llama_loss, tx, MICRO_BATCHES)
        return step, (params, moments, tokens, None), params
    step = jaxmem.schedule(step, donate_argnums=0)
    return step, args, params


def measure(name: str, optimizer: str, target: str) -> tuple:
    step, args, params = cased(name, optimizer)
    report = jaxmem.estimate(step, *args, target=target)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    each = report.peak_bytes / count
    most = CASES[name, optimizer, target]
    if name == "bert":
        text, met = f"{most:,.0f} MiB", result_of(report.peak_bytes / MIB, most)
    else:
        text, met = f"{most:g} bytes", "yes" if each <= most else "no"
    sizes = (report.argument_bytes / MIB, report.temp_bytes / MIB)
    host = report.host_bytes / count
    return *sizes, *size_and_ms(report, "peak_bytes"), each, host, text, met


if __name__ == "__main__":
    columns = ("model", "optimizer", "target", "state MiB", "temp MiB", "peak MiB")
    rows = {case: functools.partial(measure, *case) for case in CASES}
    columns += ("predicted ms", "peak, bytes a parameter", "host, bytes a parameter")
    publish_some("low_bit", (*columns, "at most", "met"), rows, sys.argv[1:])
