"""Stacks of transformer blocks: every stock checkpoint policy, and ours.

    python -m benchmarks.blocks
    python -m benchmarks.blocks GPT-2 schedule    # rows that have both; others stay

Loss gradient with all weights trained, layers in `nn.scan`, bf16 compute, f32
parameters. "fused" is attention by cuDNN as the model's author asks `jax.nn` for it;
dropout there is none. "predicted ms" is `report.seconds`; "recomputes" is what of the
forward pass the backward pass recomputes, in per cent of its matmul flops. The bytes
of the budget are those of `nothing_saveable`.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxmem
from benchmarks import bert
from benchmarks._common import MIB, publish_some, result_of, size_and_ms
from benchmarks.models.transformers import (
    GPT2_MEDIUM,
    LLAMA_1B,
    VIT_LARGE,
    Bert,
    BertConfig,
    Layer,
    LlamaLayer,
    PreLNLayer,
    Stack,
    StackConfig,
    abstract_params,
    mean_square,
)
from examples.transformer_blocks import LlamaBlock, TransformerBlock
from jaxmem.cost.equations import flops

STACKS = {
    "GPT-2 medium, 4 x 1024": (GPT2_MEDIUM, PreLNLayer, (4, 1024)),
    "ViT-L, 16 x 256": (VIT_LARGE, PreLNLayer, (16, 256)),
    "Llama-1B blocks, 2 x 2048": (LLAMA_1B, LlamaLayer, (2, 2048)),
}
FUSED = {
    "ViT-L, fused, 16 x 256": (
        dataclasses.replace(VIT_LARGE, fused=True),
        PreLNLayer,
        (16, 256),
    ),
    "Llama-1B blocks, fused, 2 x 2048": (
        dataclasses.replace(LLAMA_1B, fused=True),
        LlamaLayer,
        (2, 2048),
    ),
}


class LeanLayer(nn.Module):
    """The layer as a block of the examples."""

    config: StackConfig

    @nn.compact
    def __call__(self, x, _):
        c = self.config
        if c.kv_heads != c.heads:
            block = LlamaBlock(c.heads, c.hidden, c.kv_heads, dtype=c.dtype)
            return block(x), None
        block = TransformerBlock(
            c.heads,
            c.hidden,
            causal=c.causal,
            dropout_rate=c.dropout,
            dtype=c.dtype,
            deterministic=c.dropout == 0,
        )
        return block(x), None


POLICIES = {
    "plain": None,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": (
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
}
THRESHOLDS = {
    ("BERT-Large, 8 x 512", "substitute, schedule, 2,090 MiB"): 2090,
    ("BERT-Large, 8 x 512", "8-bit storage, schedule"): 1250,
}
CODES = jaxmem.ops.Quantization(8, block_size=512, symmetric=True)
# MiB of temporaries that a user might give; without a budget XLA's order takes more
ROOM = {"BERT-Large, 8 x 512": 2090, "ViT-L, 16 x 256": 2160}
TARGET = "h100"


SMALL_BERT = BertConfig(2, 64, 2, 128, 97)


def smaller(config: StackConfig) -> StackConfig:
    """The stack in small, for a run that only has to end."""
    groups = config.heads // config.kv_heads
    sizes = {"layers": 2, "width": 32 * groups, "hidden": 64 * groups}
    return dataclasses.replace(config, **sizes, heads=2 * groups, kv_heads=2)


def gradient_of_stack(model: Stack, shape: tuple[int, int]):
    """(loss gradient, its arguments) of a stack; `shape`: batch and positions."""
    loss, config = mean_square(model), model.config
    step = lambda params, x, key: jax.grad(loss)(
        params, x, jax.random.wrap_key_data(key)
    )
    x = jax.ShapeDtypeStruct((*shape, config.width), config.dtype)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    # the same parameters, without a GPU that `jax.nn` would ask for
    written_out = model.clone(config=dataclasses.replace(config, fused=False))
    return step, (abstract_params(written_out, x), x, key)


def made(name: str, policy=None, lean=False, small=False, stacks=STACKS | FUSED):
    """The model, its layer under a checkpoint policy, and its loss gradient's args."""
    remat = functools.partial(nn.remat, policy=policy, prevent_cse=False)
    wrap = (lambda layer: layer) if policy is None else remat
    if name not in stacks:
        config = SMALL_BERT if small else BertConfig()
        return bert.gradient, Bert(config, layer=wrap(Layer))
    config, layer, shape = stacks[name]
    if small:
        config, shape = smaller(config), (2, 64)
    gradient = functools.partial(gradient_of_stack, shape=shape)
    return gradient, Stack(config, LeanLayer if lean else wrap(layer))


def matmul_flops(fn, *args) -> float:
    """Multiplications and additions of all matmuls, scans counted in full."""
    return sum(map(flops, jax.make_jaxpr(fn)(*args).eqns))


def scheduled(step, budget: int | None = None):
    return jaxmem.schedule(step, budget, target=TARGET, donate_argnums=())


def in_bytes_of(name: str, policy: str, step, args):
    """Scheduled in the bytes that a stock policy takes."""
    gradient, model = made(name, POLICIES[policy])
    stock, own = gradient(model)
    report = jaxmem.estimate(stock, *own, target=TARGET)
    return scheduled(step, report.peak_bytes)


def variants(name: str):
    """(what it is, loss gradient, its arguments) of every row."""
    for policy, rule in POLICIES.items():
        gradient, model = made(name, rule)
        yield policy, *gradient(model)
    gradient, model = made(name)
    step, args = gradient(model)
    yield "schedule", scheduled(step), args
    step, args = gradient(jaxmem.substitute(model))
    yield "substitute", step, args
    yield "substitute, schedule", scheduled(step), args
    least = in_bytes_of(name, "nothing_saveable", step, args)
    yield "substitute, schedule, budget", least, args
    if name in ROOM:
        report = jaxmem.estimate(step, *args, target=TARGET)
        room = report.peak_bytes - report.temp_bytes + ROOM[name] * MIB
        yield f"substitute, schedule, {ROOM[name]:,} MiB", scheduled(step, room), args
    if name in FUSED:
        return
    gradient, model = made(name)
    step, args = gradient(jaxmem.substitute(model, save=CODES))
    yield "8-bit storage, schedule", scheduled(step), args
    if name in STACKS:
        gradient, model = made(name, lean=True)
        step, args = gradient(model)
        yield "block", step, args
        yield "block, schedule", scheduled(step), args


def row(name: str, variant: str, step, args) -> tuple:
    """Of one variant; the plain one is what a step computes at least."""
    temp, ms = size_and_ms(jaxmem.estimate(step, *args, target=TARGET))
    threshold = THRESHOLDS.get((name, variant))
    recomputed: Any = ""
    if name not in FUSED:  # what cuDNN computes is not in the step's graph
        plain = plain_flops(name)
        recomputed = 100 * (matmul_flops(step, *args) - plain) / (plain / 3)
    return temp, round(ms, 2), recomputed, threshold or "", result_of(temp, threshold)


@functools.cache
def plain_flops(name: str) -> float:
    gradient, model = made(name)
    step, args = gradient(model)
    return matmul_flops(step, *args)


def measures(name: str) -> dict[tuple[str, str], Callable[[], tuple]]:
    """The first cells of a model's rows -> what measures the rest."""
    return {
        (name, variant): functools.partial(row, name, variant, step, args)
        for variant, step, args in variants(name)
    }


def main() -> None:
    names = ("BERT-Large, 8 x 512", *STACKS, *FUSED)
    rows = {key: run for name in names for key, run in measures(name).items()}
    columns = ("model", "how", "temp MiB", "predicted ms", "recomputes %")
    columns = (*columns, "at most", "met")
    publish_some("blocks", columns, rows, sys.argv[1:])


if __name__ == "__main__":
    main()
