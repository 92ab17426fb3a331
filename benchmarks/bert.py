"""BERT-Large in Flax linen, plain and after `jaxmem.substitute` alone.

    python -m benchmarks.bert            # temp bytes of the loss gradient
    python -m benchmarks.bert h100       # rows that have it; others stay
    python -m benchmarks.bert --losses   # 100 steps of a small BERT, plain and lean

24 layers in `nn.scan`, batch 8 of 512 tokens, dropout 0.1, bf16 compute, f32
parameters.
"""

import argparse
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem
from benchmarks._common import (
    TARGETS,
    publish,
    publish_some,
    result_of,
    size_and_ms,
)
from benchmarks.models.transformers import (
    Bert,
    BertConfig,
    abstract_params,
    masked_loss,
)
from benchmarks.steps.train import flat_step

THRESHOLDS = {("substituted", "h100"): 2600}
TOKENS = jax.ShapeDtypeStruct((8, 512), jnp.int32)
KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)


def gradient(model):
    """The loss gradient, and the arguments to compile it at."""
    loss = masked_loss(model)
    step = lambda params, tokens, key: jax.grad(loss)(
        params, tokens, jax.random.wrap_key_data(key)
    )
    return step, (abstract_params(model, TOKENS), TOKENS, KEY)


def models(config, **kwargs):
    plain = Bert(config, **kwargs)
    yield "plain", plain
    yield "substituted", jaxmem.substitute(plain)


def taken(model, target: str) -> tuple[float, float]:
    """MiB of the loss gradient's temporaries, and its predicted ms."""
    step, args = gradient(model)
    return size_and_ms(jaxmem.estimate(step, *args, target=target))


def row(name: str, model, target: str) -> tuple:
    (size, ms), threshold = taken(model, target), THRESHOLDS.get((name, target))
    return size, ms, threshold or "", result_of(size, threshold)


def memory(words: Sequence[str]) -> None:
    rows = {
        (name, target): functools.partial(row, name, model, target)
        for name, model in models(BertConfig())
        for target in TARGETS
    }
    columns = ("model", "target", "temp MiB", "predicted ms", "at most", "met")
    publish_some("bert", columns, rows, words)


def train(model, dtype, steps: int) -> list[float]:
    """Losses of `steps` steps of Adam on random tokens, the same for every model."""
    data = np.random.default_rng(0).integers(0, 97, (steps, 4, 32)).astype(np.int32)
    loss, tx = masked_loss(model), optax.adam(1e-3)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = model.init(keys, data[0])["params"]

    step = jax.jit(flat_step(jax.value_and_grad(loss), tx))
    state, losses = tx.init(params), []
    for i, tokens in enumerate(data):
        key = jax.random.fold_in(jax.random.key(2), i)
        params, state, value = step(params, state, tokens, key)
        losses.append(float(value))
    return losses


def losses(steps: int = 100) -> None:
    """With dropout 0: else the two draw different masks of the same law."""
    rows = []
    for dtype in (jnp.float32, jnp.bfloat16):
        config = BertConfig(2, 64, 4, 128, 97, 32, dropout=0.0, dtype=dtype)
        plain, lean = (train(m, dtype, steps) for _, m in models(config))
        apart = np.abs(np.subtract(plain, lean)) / np.abs(plain)
        rows.append(
            (jnp.dtype(dtype).name, f"{plain[0]:.4f}", f"{plain[-1]:.5f}")
            + (f"{lean[-1]:.5f}", f"{apart.max():.1e}", f"{jnp.finfo(dtype).eps:.1e}")
        )
    columns = ("dtype", "first loss", "plain, last", "substituted, last")
    publish("bert_losses", (*columns, "largest relative difference", "eps"), rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--losses", action="store_true")
    options = parser.parse_args()
    losses() if options.losses else memory(options.words)
