"""What VeLoRA's direction does to training: losses by where the vector comes from.

    python -m benchmarks.velora         # all; about four minutes
    python -m benchmarks.velora svd     # these rows; the others stay

The demo's byte GPT on the Python standard library's sources (2 layers of 64, crops of
64 bytes, 150 steps, three seeds), plain and with `VeLoRADense` in its MLPs, each token
in 16 or in 4 sub-tokens. "init": the vector comes from a batch of zeros, the inputs of
an ordinary `init`, and stays. "frozen": the kernels of the MLPs are not trained, for
what any gradient of theirs is worth here. Losses are of data held out, nats a byte.
"cosine": of the gradient of the MLPs' kernels to the exact one, the mean over layers
and seeds, at the first step and at the last one.
"""

import functools
import itertools
import sys
from collections.abc import Iterator
from statistics import fmean
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._common import publish_some
from jaxmem.demo import Settings, data, training
from jaxmem.demo.models import GPT
from jaxmem.nn import linen

SEEDS = (0, 1, 2)
GROUPS = ("16", "4")
VECTORS = ("init", "average", "ema", "svd")
PLAIN, FROZEN = ("plain", ""), ("frozen", "")
CASES = (PLAIN, FROZEN, *itertools.product(VECTORS, GROUPS))
SHAPE = {"model": "linen", "layers": 2, "width": 64, "context": 64, "batch": 8}
MLPS = ("up", "down")
STEPS, BATCHES = 150, 32
COLUMNS = (
    *("vector", "groups", *(f"seed {s}" for s in SEEDS), "mean"),
    *("cosine, first", "cosine, last"),
)


class Step(NamedTuple):
    """A case's functions, compiled once for all seeds."""

    model: GPT
    update: Any
    loss: Any
    cosine: Any


def model_of(vector: str, groups: str, settings: Settings) -> GPT:
    if (vector, groups) in (PLAIN, FROZEN):
        return GPT(settings)
    method = "average" if vector == "init" else vector
    how = {"groups": int(groups), "method": method}
    return GPT(settings, dense=functools.partial(linen.VeLoRADense, **how))


def compiled(vector: str, groups: str, settings: Settings) -> Step:
    model, tx = model_of(vector, groups, settings), training.make_optimizer(settings)

    def loss(params, state, tokens, model=model):
        variables = {"params": params, **state}
        logits, state = model.apply(variables, tokens[:, :-1], mutable=["velora"])
        cross = optax.softmax_cross_entropy_with_integer_labels
        return cross(logits, tokens[:, 1:]).mean(), state

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def update(params, moments, state, tokens):
        grads, state = jax.grad(loss, has_aux=True)(params, state, tokens)
        if (vector, groups) == FROZEN:
            grads = without_mlps(grads)
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, state

    def kernels(params, state, tokens, model):
        grads = jax.grad(loss, has_aux=True)(params, state, tokens, model)[0]
        return [grads["blocks"][name]["kernel"] for name in MLPS]

    @jax.jit
    def cosine(params, state, tokens):
        """Of each layer's kernels."""
        ours = kernels(params, state, tokens, model)
        exact = kernels(params, {}, tokens, GPT(settings))
        flat = lambda g: g.reshape(g.shape[0], -1)
        both = zip(map(flat, ours), map(flat, exact), strict=True)
        return jnp.stack([optax.losses.cosine_similarity(a, b) for a, b in both])

    return Step(model, update, jax.jit(loss), cosine)


def without_mlps(grads):
    zero = lambda layer: {**layer, "kernel": jnp.zeros_like(layer["kernel"])}
    blocks = grads["blocks"]
    return {**grads, "blocks": {**blocks, **{n: zero(blocks[n]) for n in MLPS}}}


def crops(part: str, seed: int) -> Iterator[np.ndarray]:
    text = getattr(data.standard_library(), part)
    return data.batches(text, SHAPE["batch"], SHAPE["context"], seed)


def train(vector: str, step: Step, settings: Settings) -> tuple[float, float, float]:
    """(held-out loss, cosine at the first step, at the last)."""
    blank = jnp.zeros((1, SHAPE["context"]), jnp.int32)
    variables = dict(step.model.init(jax.random.key(settings.seed), blank))
    params, state = variables.pop("params"), variables
    if vector == "init":
        state = step.loss(params, state, jnp.zeros((1, SHAPE["context"] + 1), int))[1]
    moments = training.make_optimizer(settings).init(params)
    batches, found = crops("train", settings.seed), []
    for number in range(STEPS):
        tokens = next(batches)
        if number in (0, STEPS - 1):
            found.append(float(step.cosine(params, state, tokens).mean()))
        params, moments, state = step.update(params, moments, state, tokens)
    batches = crops("validation", 0)
    losses = [step.loss(params, state, next(batches))[0] for _ in range(BATCHES)]
    return fmean(map(float, losses)), *found


def measured(vector: str, groups: str) -> list[str]:
    """The row of one case."""
    settings = Settings(**SHAPE, steps=STEPS)
    step = compiled(vector, groups, settings)
    runs = [
        train(vector, step, Settings(**SHAPE, steps=STEPS, seed=seed)) for seed in SEEDS
    ]
    losses, first, last = zip(*runs, strict=True)
    jax.clear_caches()
    cosines = (f"{fmean(c):.3f}" for c in (first, last))
    return [*(f"{x:.4f}" for x in losses), f"{fmean(losses):.4f}", *cosines]


if __name__ == "__main__":
    words = sys.argv[1:]
    cases = {case: functools.partial(measured, *case) for case in CASES}
    publish_some("velora", COLUMNS, cases, words)
