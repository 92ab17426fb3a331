"""What approximations do to training: final losses beside exact training's.

    python -m benchmarks.training           # all; about ten minutes
    python -m benchmarks.training wta-crs   # this row anew, the others as they are

The demo's byte GPT on the Python standard library's sources (2 layers of 64, crops of
64 bytes, 150 steps), and a small ViT on scikit-learn's digits (8 x 8 pixels, 2 x 2
patches, 4 layers of 64, 200 steps), three seeds each. Losses are of data held out:
nats a byte, nats a digit; and of the digits the share that is read right.
"""

import itertools
import sys
from collections.abc import Callable
from statistics import fmean

import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

from benchmarks._common import publish, published
from jaxmem.demo import Settings, data, training
from jaxmem.demo.techniques import TECHNIQUES

SEEDS = (0, 1, 2)
VARIANTS = (
    *("plain", "exact", "bits-1", "bits-2", "bits-3", "bits-4", "regelu2"),
    *("storage-8", "storage-float8", "storage-4", "wta-crs"),
)
HELD_OUT = 360  # digits
DIGIT_STEPS, DIGIT_BATCH = 200, 64
GPT = {"model": "linen", "layers": 2, "width": 64, "context": 64, "batch": 8}
GPT_STEPS = 150


class Block(nn.Module):
    """A pre-LN layer as a user writes it."""

    dense: Callable[..., nn.Module] = nn.Dense

    @nn.compact
    def __call__(self, x, _):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4, name="attention")(y)
        y = nn.gelu(self.dense(256, name="up")(nn.LayerNorm()(x)))
        return x + self.dense(x.shape[-1], name="down")(y), None


class ViT(nn.Module):
    """Logits of ten digits from 8 x 8 pixels; `dense` are the layers of the MLPs."""

    dense: Callable[..., nn.Module] = nn.Dense

    @nn.compact
    def __call__(self, pixels):
        patches = pixels.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4)
        x = nn.Dense(64, name="patches")(patches)
        x = x + self.param("places", nn.initializers.normal(0.02), (1, 16, 64))
        stack = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=4,
        )
        x = stack(self.dense, name="layers")(x, None)[0]
        return nn.Dense(10, name="head")(nn.LayerNorm()(x).mean(axis=1))


def digits():
    """(training, held out), each (pixels, labels)."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    pixels = (data.images[order] / 8 - 1).astype(np.float32)
    labels = data.target[order].astype(np.int32)
    split = len(labels) - HELD_OUT
    return (pixels[:split], labels[:split]), (pixels[split:], labels[split:])


def train_vit(variant: str, seed: int) -> tuple[float, float]:
    """(loss, share right) of held-out digits."""
    train, held = digits()
    plain = ViT()
    model = plain if variant == "plain" else TECHNIQUES[variant].change(plain)
    params = plain.init(jax.random.key(seed), held[0][:1])["params"]
    tx = optax.adamw(optax.cosine_decay_schedule(3e-3, DIGIT_STEPS))

    def loss(params, pixels, labels, key):
        logits = model.apply({"params": params}, pixels, rngs={"dropout": key})
        cross = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return cross.mean(), (logits.argmax(-1) == labels).mean()

    @jax.jit
    def step(params, state, pixels, labels, key):
        grads = jax.grad(loss, has_aux=True)(params, pixels, labels, key)[0]
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    rng, state = np.random.default_rng(seed), tx.init(params)
    for number in range(DIGIT_STEPS):
        some = rng.integers(0, len(train[1]), DIGIT_BATCH)
        key = jax.random.fold_in(jax.random.key(seed), number)
        params, state = step(params, state, train[0][some], train[1][some], key)
    value, right = jax.jit(loss)(params, *held, jax.random.key(0))
    return float(value), float(right)


def train_gpt(variant: str, seed: int) -> float:
    """Validation loss, nats a byte."""
    technique = "exact" if variant == "plain" else variant
    settings = Settings(**GPT, steps=GPT_STEPS, seed=seed, technique=technique)
    name = "plain" if variant == "plain" else "substituted"
    run = training.start(*training.pair(settings)[name], settings)
    text = data.standard_library()
    crops = data.batches(text.train, settings.batch, settings.context, seed)
    training.train({name: run}, crops, settings)
    crops = data.batches(text.validation, settings.batch, settings.context, 0)
    return training.validate(run, crops, 32)


def measured(variant: str) -> tuple:
    """The row of one technique."""
    text = [train_gpt(variant, seed) for seed in SEEDS]
    vision, right = zip(*(train_vit(variant, seed) for seed in SEEDS), strict=True)
    means = fmean(text), fmean(vision), 100 * fmean(right)
    return variant, *text, means[0], *vision, *means[1:]


def main() -> None:
    chosen = sys.argv[1:] or VARIANTS
    if unknown := set(chosen) - set(VARIANTS):
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(VARIANTS)}")
    new = {}
    for variant in chosen:
        name, *figures = measured(variant)
        new[variant] = (name, *(f"{x:.4f}" for x in figures))
        print(*new[variant], flush=True)
    found = {row[0]: row for row in published("training")} | new
    rows = [found[variant] for variant in VARIANTS if variant in found]
    seeds = [f"{m}, seed {s}" for m, s in itertools.product(("GPT", "ViT"), SEEDS)]
    columns = ("technique", *seeds[:3], "GPT mean", *seeds[3:], "ViT mean", "right %")
    publish("training", columns, rows)


if __name__ == "__main__":
    main()
