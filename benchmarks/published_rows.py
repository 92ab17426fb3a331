"""Published figures of long contexts and large models, beside ours on the same work.

    python -m benchmarks.published_rows          # every row
    python -m benchmarks.published_rows pi0      # rows that have the word; others stay

Each row compiles two steps for its chips: the recipe of who published it, as it is
written in JAX, and the plain model under `jaxmem.schedule`. Bytes are GB (10^9) of the
peak on one device, as those who publish count; milliseconds are `report.seconds`.
"Host GB" are in the host's memory for one device. Where the compiler for TPUs refuses
the plain model, its peak is not known. `differs` says what could not be reproduced.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import optax

import jaxmem
from benchmarks._common import publish_some
from benchmarks.models import pi0
from benchmarks.models.splash_ring import CONTEXT
from benchmarks.pod import HOST_BUDGET
from benchmarks.steps import experts, grug, pod, ring
from benchmarks.steps.long_context import AXIS, LLAMA3_8B, QWEN3_8B, step_of
from benchmarks.steps.published import FSDP
from benchmarks.steps.tiles import BF16, Made
from jaxmem.memory import MemoryReport
from jaxmem.optim import adamw, stochastic_rounding

GB = 1e9
H100, V5P = "h100", "tpu-v5p"
TIMEOUT = 1800.0  # seconds of a compile
COLUMNS = (
    *("row", "devices", "published GB", "goal GB", "recipe GB", "recipe: predicted ms"),
    *("recipe: host GB", "plain GB", "GB", "predicted ms", "host GB", "typed"),
    *("compiles", "search s", "recipe", "differs", "link"),
)
GITHUB = "https://github.com/"
OVERLAP = "xla_gpu_enable_latency_hiding_scheduler"


@dataclass(frozen=True)
class PublishedRow:
    """A published figure, its recipe, and what is typed here.

    Attributes:
      link: where the figure stands, after `GITHUB`; empty of a figure of our own.
      devices: how many chips.
      published: GB of a device; None where only buffers of it were published.
      goal: GB of a device.
      recipe: what those who published it did, as a step.
      recipe_says: the same in words.
      plain: the model without any of that.
      budget: of `jaxmem.schedule`.
      how: what else it is given.
      compiler_options: of the recipe.
      chip: a name of `jaxmem.targets()`.
      differs: what is other than in what was published.
    """

    link: str
    devices: int
    published: float | None
    goal: float
    recipe: Callable[[], Made]
    recipe_says: str
    plain: Callable[[], Made]
    budget: str
    how: Mapping[str, Any] = field(default_factory=dict)
    compiler_options: Mapping[str, Any] | None = None
    chip: str = H100
    differs: str = ""


def _long(sizes, tokens: int, code: str = "plain", **how) -> Made:
    mesh = jaxmem.target_mesh(H100, (8,), (AXIS,))
    return step_of(sizes, mesh, tokens, code, **how)


def _unrolled(code: str) -> Callable[[], Made]:
    return functools.partial(_long, LLAMA3_8B, 2**17, code, unrolled=True)


def _ring(tokens: int, published: float) -> PublishedRow:
    """32,768 tokens a chip: two million in a step."""
    mesh = jaxmem.target_mesh(V5P, (4, 16), (FSDP, CONTEXT))
    batch = 2**21 // tokens // mesh.shape[FSDP]
    make = functools.partial(ring.step_of, LLAMA3_8B, mesh, tokens, batch)
    return PublishedRow(
        link="AI-Hypercomputer/maxtext/pull/4720",
        devices=mesh.size,
        published=published,
        goal=40,
        recipe=functools.partial(make, "context"),
        recipe_says="layers checkpointed, what attention gives is kept",
        plain=make,
        budget="40GB",
        chip=V5P,
        differs=f"{batch} examples for each of four groups of 16 chips; JAX's splash "
        "kernels, where MaxText has Tokamax's; gradients are not clipped.",
    )


def _grug(write: Callable = lambda layer: layer) -> Made:
    mesh = jaxmem.target_mesh(H100, (8,), (grug.AXIS,))
    return grug.step_of(mesh, write=write)


def _llama_70b(write: Callable = lambda layer: layer) -> Made:
    return pod.step_of(pod.LLAMA, pod.FSDP, "tpu-v5e", 256, write=write)


def _experts(layers: int, data: int) -> PublishedRow:
    mesh = jaxmem.target_mesh(V5P, (data, 4), (experts.DATA, experts.EXPERT))
    make = functools.partial(experts.step_of, layers, mesh, 2, 4096)
    return PublishedRow(
        link="AI-Hypercomputer/maxtext/pull/3493",
        devices=mesh.size,
        published=None,
        goal=32,
        recipe=functools.partial(make, jax.checkpoint),
        recipe_says="layers checkpointed",
        plain=make,
        budget="32GB",
        chip=V5P,
        differs="Published, and in NVIDIA/Megatron-LM/pull/4247, are buffers of "
        "262,144 rows of 7,168 channels in every layer; the goal is a third of the "
        f"plain step. The mixtures alone, of {layers} layers, without attention and "
        "embeddings; experts by a softmax, where DeepSeek-V3 limits them to groups; "
        "parameters and moments in float32.",
    )


def typed(budget: str | None, how: Mapping[str, Any]) -> str:
    """The call of `jaxmem.schedule`."""
    given = [] if budget is None else [f'"{budget}"']
    given += [f"{name}={value!r}" for name, value in how.items()]
    return f"schedule({', '.join(['step', *given])})"


ROWS: dict[str, PublishedRow] = {
    "Qwen3-8B, 1,048,576 tokens": PublishedRow(
        link="huggingface/accelerate/pull/4184",
        devices=8,
        published=56.2,
        goal=45,
        recipe=functools.partial(_long, QWEN3_8B, 2**20, "offload, chunks"),
        recipe_says="layers checkpointed, their inputs on the host, loss in chunks",
        plain=functools.partial(_long, QWEN3_8B, 2**20),
        budget="45GB",
        how={"offload": True, "host_budget": "160GB"},
        differs="Heads are exchanged for tokens, where the published run has a ring; "
        "parameters and moments are in float32. Published: 373 s a step.",
    ),
    "Llama-3-8B unrolled, 131,072 tokens, latency hiding": PublishedRow(
        link="openxla/xla/pull/45753",
        devices=8,
        published=65,
        goal=33.4,
        recipe=_unrolled("checkpoint"),
        recipe_says="layers checkpointed, latency hiding off",
        plain=_unrolled("checkpoint"),
        budget="33.4GB",
        how={"compiler_options": {OVERLAP: True}},
        compiler_options={OVERLAP: False},
        differs="Published are temporaries of MaxText's step on eight H200, with "
        "latency hiding 290 GB; the goal is 1.1 times the recipe's peak.",
    ),
    "pi0, all parameters, batch of 32": PublishedRow(
        link="Physical-Intelligence/openpi/issues/667",
        devices=1,
        published=70,
        goal=24,
        recipe=lambda: pi0.full_step(optax.adamw(1e-4), 32, write=jax.checkpoint),
        recipe_says="layers checkpointed, AdamW in float32",
        plain=lambda: pi0.full_step(stochastic_rounding(adamw(1e-4)), 32, BF16),
        budget="24GB",
        differs="Ours has parameters in bfloat16 by stochastic rounding, and moments "
        "in 8 bits; no moving average of the parameters.",
    ),
    "pi0, LoRA, batch of 32": PublishedRow(
        link="Physical-Intelligence/openpi/issues/667",
        devices=1,
        published=22.5,
        goal=12,
        recipe=lambda: pi0.lora_step(optax.adamw(1e-4), 32, write=jax.checkpoint),
        recipe_says="layers checkpointed, AdamW in float32",
        plain=lambda: pi0.lora_step(adamw(1e-4), 32),
        budget="12GB",
        differs="Frozen parameters in bfloat16, the trained ones in float32; with "
        "`schedule`, moments in 8 bits.",
    ),
    "Llama-3.1-8B, 65,536 tokens, 64 v5p": _ring(2**16, 50.2),
    "Llama-3.1-8B, 262,144 tokens, 64 v5p": _ring(2**18, 49.2),
    "DeepSeek-V3's experts, 64 of 256 a chip, 128 v5p": _experts(3, 32),
    "Grug, 64 experts, batch of 16": PublishedRow(
        link="marin-community/marin/issues/5394",
        devices=8,
        published=58,
        goal=17.2,
        recipe=functools.partial(_grug, jax.checkpoint),
        recipe_says="layers checkpointed",
        plain=_grug,
        budget="17.2GB",
        differs="Published are temporaries on jax 0.9.2, on 0.8.0 16 GB: since then "
        "ragged_dot is an instruction of XLA, which copies all rows for each expert. "
        "Dense first layers, windows of attention, gated norms and the router's z-loss "
        "are left out; AdamW instead of Muon.",
    ),
    "Llama-70B, 256 v5e": PublishedRow(
        link="",
        devices=256,
        published=None,
        goal=16.9,
        recipe=functools.partial(_llama_70b, jax.checkpoint),
        recipe_says="layers checkpointed",
        plain=_llama_70b,
        budget="15.75GiB",
        how={"offload": True, "host_budget": HOST_BUDGET},
        chip="tpu-v5e",
        differs="A step of `benchmarks.pod`, in all the memory of the chip, with "
        "residuals in the host's; nobody has published it.",
    ),
}


def gigabytes(report: MemoryReport) -> tuple[float, float, float]:
    """GB of the peak, predicted milliseconds, and GB in the host's memory."""
    assert report.seconds is not None  # a chip whose rates are known
    return report.peak_bytes / GB, 1e3 * report.seconds, report.host_bytes / GB


def measured(row: PublishedRow) -> Sequence:
    made = row.recipe()
    recipe = jaxmem.estimate(
        made.step,
        *made.args,
        target=row.chip,
        donate_argnums=made.donate,
        compiler_options=row.compiler_options,
        timeout=TIMEOUT,
    )
    made = row.plain()
    how = {"target": row.chip, "donate_argnums": made.donate, "progress": False}
    step = jaxmem.schedule(made.step, row.budget, **how, **row.how)
    plan = step.plan(*made.args)
    assert plan.scheduled is not None
    published = "" if row.published is None else row.published
    plain = "" if plan.plain is None else plan.plain.peak_bytes / GB
    return (
        *(row.devices, published, row.goal, *gigabytes(recipe)),
        *(plain, *gigabytes(plan.scheduled), typed(row.budget, row.how)),
        *(len(plan.tried), plan.planning_seconds),
        *(row.recipe_says, row.differs, GITHUB + row.link if row.link else ""),
    )


if __name__ == "__main__":
    cases = {(name,): functools.partial(measured, row) for name, row in ROWS.items()}
    publish_some("published_rows", COLUMNS, cases, sys.argv[1:])
