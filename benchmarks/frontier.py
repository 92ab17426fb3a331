"""Milliseconds over MiB: every checkpoint policy, and `schedule` in as many bytes.

    python -m benchmarks.frontier                 # every model, and the pictures
    python -m benchmarks.frontier Llama save_qkv  # rows that have both; others stay
    python -m benchmarks.frontier --pictures      # the pictures alone

Loss gradients on an H100: stacks of layers, scanned and unmodified (`STACKS`, `FUSED`
and `LARGE`), the models of `benchmarks.models.wrapped`, and some with unrolled layers
(`benchmarks.models.unrolled`; two of tunix, for which the extra `foreign` has to be
installed). The policies are JAX's, for each layer, block or step of
time. Stacks have those of MaxText by name as well (`benchmarks.models.named`), and
`nn.remat` of every second layer; the LSTM has `nothing_saveable` for many steps at a
time. Beside a policy that sends arrays to the host's memory `schedule` may, too
(`offload=True`). "ratio": our predicted time over the policy's.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import jaxmem
from benchmarks import _pictures, blocks
from benchmarks._common import (
    peak_with,
    publish_some,
    published,
    size_and_ms,
)
from benchmarks.blocks import FUSED, POLICIES, STACKS, TARGET
from benchmarks.budget import AXES
from benchmarks.models import named, unrolled, wrapped
from benchmarks.models.transformers import LlamaLayer, StackConfig
from benchmarks.models.zoo_transformers import OneHotMixtralLayer
from jaxmem.scheduling import BudgetError, Plan

LARGE = {
    "Llama-7B blocks, fused, 1 x 4096": (
        StackConfig(8, 4096, 32, 32, 11008, 0.0, fused=True),
        LlamaLayer,
        (1, 4096),
    ),
    "Mixtral blocks, fused, 2 x 2048": (
        StackConfig(8, 2048, 32, 8, 7168, 0.0, fused=True),
        OneHotMixtralLayer,
        (2, 2048),
    ),
}
NETS = {
    "ResNet-50, 128 x 224 x 224": wrapped.resnet,
    "U-Net with attention, 64 x 64 x 64": wrapped.unet,
    "graph network, 400,000 edges": wrapped.graph,
    "BERT-base in nnx, unrolled, 16 x 512": unrolled.gradient,
    "GPT-2 small in nnx, unrolled, 16 x 512": functools.partial(
        unrolled.gradient, kind=unrolled.GPT
    ),
}
CHUNK = 64  # of the LSTM's steps; the square root of their number
IN_CHUNKS = f"nothing_saveable, {CHUNK} steps at a time"
# tunix's own `remat_config`: attention and MLP apart, or a layer as a whole
OF_TUNIX = {f"remat_config={word}": word for word in ("BLOCK", "DECODER")}
TUNIX = {"Qwen3 of tunix, 2 x 2048": "qwen3", "Gemma of tunix, 2 x 2048": "gemma"}
PICTURES = _pictures.IMAGES / "frontier"
EVERY_SECOND, WITHOUT = "nn.remat, every second layer", "no budget"
COLUMNS = (
    *("model", "policy", "temp MiB", "predicted ms"),
    *("schedule: temp MiB", "schedule: predicted ms", "ratio", "compiles", "seconds"),
)

made = functools.partial(blocks.made, stacks=STACKS | FUSED | LARGE)


class Model(NamedTuple):
    """A model of the comparison.

    Attributes:
      policies: those that it can have, by name.
      under: a policy's name -> (loss gradient, its arguments).
    """

    policies: tuple[str, ...]
    under: Callable[[str], tuple[Callable, tuple]]


def stack_under(name: str, policy: str):
    """A stack of `benchmarks.blocks`, each layer under the policy."""
    if policy == EVERY_SECOND:
        gradient, model = made(name)
        config = dataclasses.replace(model.config, layers=model.config.layers // 2)
        return gradient(
            model.clone(config=config, layer=named.every_second(model.layer))
        )
    gradient, model = made(name, {**POLICIES, **named.POLICIES}[policy])
    step, args = gradient(model)
    return (named.with_names(step) if policy in named.POLICIES else step), args


def net_under(make: Callable, policy: str):
    """One of `NETS`, each block under the policy."""
    return make(POLICIES[policy])


def lstm_under(policy: str):
    """The LSTM, a step or a chunk of the steps under the policy."""
    rule = POLICIES["nothing_saveable" if policy == IN_CHUNKS else policy]
    return wrapped.lstm(rule, chunk=CHUNK if policy == IN_CHUNKS else 1)


def tunix_under(family: str, policy: str):
    """One of `TUNIX`, under a choice of the library that it is from."""
    from benchmarks.models.foreign_tunix import FAMILIES  # the extra `foreign` has it

    return FAMILIES[family].gradient(OF_TUNIX.get(policy, "NONE"))


OF_STACKS = (*POLICIES, EVERY_SECOND, *named.POLICIES)
MODELS = {
    name: Model(OF_STACKS, functools.partial(stack_under, name))
    for name in ("BERT-Large, 8 x 512", *STACKS, *FUSED, *LARGE)
} | {
    name: Model((*POLICIES,), functools.partial(net_under, make))
    for name, make in NETS.items()
}
MODELS |= {
    name: Model(("plain", *OF_TUNIX), functools.partial(tunix_under, family))
    for name, family in TUNIX.items()
}
MODELS["LSTM, 4,096 steps of 64 x 512"] = Model((*POLICIES, IN_CHUNKS), lstm_under)


@functools.cache
def taken(name: str, policy: str) -> tuple[float, float]:
    """(MiB of temporaries, predicted ms) under a policy."""
    step, args = MODELS[name].under(policy)
    return size_and_ms(jaxmem.estimate(step, *args, target=TARGET))


@functools.cache
def plan_in(name: str, room: float | None, offload: bool = False) -> Plan | str:
    """The plan of the unmodified model in so many MiB of temporaries; None: no budget.

    Or that there is none.
    """
    step, args = MODELS[name].under("plain")
    budget = None
    if room is not None:
        plain = jaxmem.estimate(step, *args, target=TARGET)
        budget = peak_with(plain, room)
    return planned(step, args, budget, target=TARGET, offload=offload)


def planned(step: Callable, args: tuple, budget: int | None, **how) -> Plan | str:
    """The plan of a step that donates nothing, or that there is none."""
    try:
        return jaxmem.schedule(step, budget, donate_argnums=(), **how).plan(*args)
    except BudgetError as error:
        print(error)
        return "out of reach"


def row(name: str, policy: str) -> tuple:
    """A policy, and ours in its bytes; without a budget beside the fastest policy."""
    if policy == WITHOUT:
        found = [taken(name, p) for p in here(name)]
        theirs, plan = min(found, key=lambda one: one[1]), plan_in(name, None)
    else:
        theirs = taken(name, policy)
        away = policy in named.OFFLOADED
        plan = plan_in(name, float(round(theirs[0])), offload=away)
    if isinstance(plan, str):
        return (*theirs, plan, *[""] * 4)
    ours = size_and_ms(plan.scheduled)
    about = len(plan.tried), plan.planning_seconds
    return (*theirs, *ours, f"{ours[1] / theirs[1]:.3f}", *about)


def here(name: str) -> list[str]:
    """A model's policies that send nothing to the host's memory."""
    return [p for p in MODELS[name].policies if p not in named.OFFLOADED]


def measures() -> dict[tuple[str, str], Callable[[], tuple]]:
    """The first cells of the rows -> what measures the rest."""
    return {
        (name, policy): functools.partial(row, name, policy)
        for name, model in MODELS.items()
        for policy in (*model.policies, WITHOUT)
    }


def draw() -> None:
    """One picture a model: each policy a point, ours the line.

    Not what sends arrays away.
    """
    found = [dict(zip(COLUMNS, r, strict=True)) for r in published("frontier")]
    point = lambda r, of="": tuple(float(r[f"{of}{c}"]) for c in AXES)
    for name in dict.fromkeys(r["model"] for r in found):
        own = [r for r in found if r["model"] == name]
        away = "plain", WITHOUT, *named.OFFLOADED
        theirs = {r["policy"]: point(r) for r in own if r["policy"] not in away}
        ours = [r for r in own if r["ratio"] and r["policy"] not in named.OFFLOADED]
        line = [point(r, "schedule: ") for r in ours]
        _pictures.frontier(_pictures.of_model(PICTURES, name), name, line, theirs)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    if "--pictures" not in sys.argv[1:]:
        publish_some("frontier", COLUMNS, measures(), words)
    draw()
