"""Figures that stand within the sentences of docs/."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from benchmarks.figures.rows import Row, figures, row, rows, value, whole

SEEDS = range(3)


def constant(name: str, render: Callable[..., str], *args) -> None:
    figures(name)(lambda: render(*args))


# -- single cells

CELLS: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    "batch, plain": ("batch", "largest batch", {"step": "plain"}),
    "batch, substituted": ("batch", "largest batch", {"step": "substituted"}),
    "batch, scheduled": ("batch", "largest batch", {"step": "substituted, schedule"}),
    "batch, kernels": (
        "batch",
        "largest batch",
        {"step": "substituted, kernels, schedule"},
    ),
}
for _name, _cell in CELLS.items():
    constant(_name, whole, *_cell)


def chain(kept: str) -> str:
    """MiB and predicted milliseconds of an MLP with a chain of elementwise steps."""
    r = row("storage", {"kept": kept})
    return f"{float(r['temp MiB']):,.0f} MiB in {float(r['predicted ms']):.1f} ms"


CHAINS = {
    "storage, a chain": "a chain, plain",
    "storage, its derivative": "the chain by elementwise",
    "storage, its derivative in 8 bits": "the chain by elementwise, 8 bits",
}
for _name, _kept in CHAINS.items():
    constant(_name, chain, _kept)


def attention(chip: str) -> str:
    """MiB that the kernel takes with dropout, both passes."""
    where = {"kernel": "attention, S 8192, dropout", "chip": chip}
    return f"{value('kernels', 'kernel MiB', where):,.1f}"


constant("attention's kernel, TPU", attention, "tpu-v5e")
constant("attention's kernel, GPU", attention, "h100")


# -- frozen parts: shares of what plain training of everything keeps


def share(name: str) -> str:
    where = {"model": "ResNet-101", "gradients of": "input alone"}
    return f"{value(name, '% of plain, all', where):.1f}"


constant("frozen, share kept", share, "frozen")
constant("frozen, share compiled", share, "frozen_h100")


# -- few bits


def largest_error(bits: str) -> str:
    where = {"activation": "gelu_erf", "bits": bits}
    return f"{value('fewbit-tables', 'largest error', where):.2f}"


for _bits in "234":
    constant(f"few bits, largest error, {_bits}", largest_error, _bits)


def squared_error(activation: str) -> str:
    where = {"activation": activation, "bits": "2"}
    return f"{value('fewbit-tables', 'squared error', where):.3f}"


constant("few bits, ReGELU2's error", squared_error, "regelu2")
constant("few bits, GELU's error", squared_error, "gelu_erf")


def beside_the_package() -> str:
    """How many tables have no larger error than those of the paper's package."""
    found = [r for r in rows("fewbit-tables") if r["package"]]
    # that of the package has five decimals
    better = sum(
        round(float(r["squared error"]), 5) <= float(r["package"]) for r in found
    )
    return f"{better} of {len(found)}"


constant("few bits, tables", beside_the_package)


# -- training


def of_seeds(technique: str, model: str) -> list[float]:
    r = row("training", {"technique": technique})
    return [float(r[f"{model}, seed {n}"]) for n in SEEDS]


def apart(model: str) -> str:
    """How far seeds alone are from each other."""
    losses = of_seeds("plain", model)
    return f"{max(losses) - min(losses):.3f}"


def lost(techniques: Iterable[str], model: str) -> list[float]:
    """What each seed loses by a technique."""
    plain = of_seeds("plain", model)
    return [
        ours - theirs
        for technique in techniques
        for ours, theirs in zip(of_seeds(technique, model), plain, strict=True)
    ]


def least_and_most(techniques: Iterable[str], model: str) -> str:
    found = lost(techniques, model)
    return f"{min(found):.4f} to {max(found):.4f}"


def most(technique: str, model: str) -> str:
    return f"{max(map(abs, lost([technique], model))):.4f}"


constant("training, seeds of the GPT", apart, "GPT")
constant("training, seeds of the ViT", apart, "ViT")
constant("training, few", least_and_most, ("bits-1", "bits-2", "regelu2"), "GPT")
constant("training, more bits", least_and_most, ("bits-3", "bits-4"), "GPT")
constant("training, sampled", least_and_most, ("wta-crs",), "GPT")
constant("training, 8 bits", most, "storage-8", "GPT")
constant("training, 4 bits", most, "storage-4", "GPT")
constant("training, 4 bits of the ViT", most, "storage-4", "ViT")


# -- budgets


@figures("budget, compiles")
def budget_compiles() -> str:
    found = [int(r["compiles"]) for r in rows("budget")]
    return (
        f"{min(found)} to {max(found)} compiles, {np.median(found):.0f} in the median"
    )


@figures("curve, policies slower")
def policies_slower() -> str:
    """How many take more time than ours at their bytes; we may not reach so few."""
    found = [r for r in rows("curve") if r["strategy"] not in ("plain", "schedule")]
    slower = [r for r in found if r["ours %"] and theirs(r) > float(r["ours %"])]
    return f"Of {len(found)} points of policies {len(slower)}"


def theirs(r: Row) -> float:
    return float(r["more time %"])
