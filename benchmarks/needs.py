"""What twelve known models need to be trained: bytes and predicted time, by method.

    python -m benchmarks.needs
    python -m benchmarks.needs Qwen3 LoRA    # rows that have both; others stay

Whole train steps on one chip, from shapes alone, the state donated: layers in one scan,
bfloat16 products, parameters in float32 where nothing else is said, attention fused by
one argument (cuDNN's on a GPU) where models call `jax.nn.dot_product_attention`. "GB"
(10^9 bytes) is the compiler's peak, whether the chip has as much or not. `schedule` has
no budget where the plain step fits the chip, else the chip's memory.
"""

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._common import milliseconds, publish_some
from benchmarks.models import pi0, zoo
from benchmarks.models.zoo_transformers import Llama
from benchmarks.optimizers import narrow
from benchmarks.steps.tiles import Made
from jaxmem.chips import get_target
from jaxmem.memory import DoesNotFit
from jaxmem.optim import adamw, stochastic_rounding
from jaxmem.scheduling import BudgetError

GB = 1e9
RANK = 16  # of adapters
SEARCH = 600.0  # seconds
COLUMNS = (
    *("model", "chip", "method", "parameters", "batch"),
    *("GB", "predicted ms", "chip GB", "compiles"),
)
KEEP_NONE = jax.checkpoint_policies.nothing_saveable


@dataclass(frozen=True)
class Method:
    """How a model is trained.

    Attributes:
      checkpoint: each layer under `jax.checkpoint`, as it is without a policy.
      scheduled: under `jaxmem.schedule`.
      substituted: after `jaxmem.substitute`.
      eight_bit: parameters in bfloat16, rounded at random, moments in 8 bits.
      lora: adapters alone are trained, of a base in bfloat16.
    """

    checkpoint: bool = False
    scheduled: bool = False
    substituted: bool = False
    eight_bit: bool = False
    lora: bool = False

    @property
    def tx(self) -> optax.GradientTransformation:
        if self.eight_bit:
            return stochastic_rounding(adamw(1e-4, bits=8))
        return optax.adamw(1e-4)


METHODS = {
    "AdamW": Method(),
    "AdamW, jax.checkpoint": Method(checkpoint=True),
    "AdamW, schedule": Method(scheduled=True),
    "8-bit AdamW, substitute, schedule": Method(
        scheduled=True, substituted=True, eight_bit=True
    ),
    "LoRA, jax.checkpoint": Method(checkpoint=True, lora=True),
    "LoRA, substitute, schedule": Method(scheduled=True, substituted=True, lora=True),
}


@dataclass(frozen=True)
class Known:
    """A model that is known by its name.

    Attributes:
      name: in `zoo.ZOO`; "pi0" for that of `models.pi0`.
      batch: examples of a step.
      says: what an example is.
    """

    name: str
    batch: int
    says: str

    @property
    def lora(self) -> bool:
        """Whether it has adapters."""
        return self.name == "pi0" or isinstance(self._zoo.make(True), Llama)

    @property
    def _zoo(self) -> zoo.Entry:
        return zoo.entry(self.name)

    @property
    def parameters(self) -> int:
        if self.name == "pi0":
            return sum(x.size for x in jax.tree.leaves(pi0.parameters()))
        return self._zoo.parameters

    def step(self, method: Method, chip: str) -> Made:
        """The train step by a method."""
        if self.name == "pi0":
            return _pi0_step(self.batch, method)
        return _zoo_step(self, method, chip)


MODELS = {
    "ResNet-50": Known("resnet50", 128, "images of 224 x 224"),
    "BERT-Large": Known("bert_large", 32, "sequences of 512 tokens"),
    "ViT-L/16": Known("vit_l", 64, "images of 224 x 224"),
    "U-Net": Known("unet", 8, "images of 512 x 512"),
    "GPT-2 medium": Known("gpt2_medium", 8, "sequences of 1,024 tokens"),
    "Whisper large-v3": Known("whisper_large_v3", 4, "recordings of 30 s"),
    "Llama-3.2-1B": Known("llama3_1b", 4, "sequences of 2,048 tokens"),
    "Gemma-2B": Known("gemma_2b", 4, "sequences of 2,048 tokens"),
    "pi0": Known("pi0", 8, "observations of three images"),
    "Qwen3-4B": Known("qwen3_4b", 4, "sequences of 2,048 tokens"),
    "Llama-3.1-8B": Known("llama3_8b", 4, "sequences of 2,048 tokens"),
    "Mixtral-8x7B": Known("mixtral_8x7b", 1, "sequence of 2,048 tokens"),
}
CHIPS = ("h100", "tpu-v5p")


def _model(known: Known, method: Method) -> nn.Module:
    model = zoo.entry(known.name).make(True)
    return _having(model, lora=RANK) if method.lora else model


def _having(model: nn.Module, **how: Any) -> nn.Module:
    """A transformer of Llama's kind with another configuration."""
    return model.clone(config=replace(model.config, **how))


def _zoo_step(known: Known, method: Method, chip: str) -> Made:
    inputs, policy = zoo.entry(known.name).inputs(known.batch), KEEP_NONE
    model = _model(known, method)
    # on a machine without cuDNN, shapes are those of attention that is not fused
    (params, statistics, _), logits = zoo.abstract(model, inputs, optax.identity())
    if isinstance(model, Llama) and get_target(chip).platform == "cuda":
        model = _having(model, fused=True)
    model, wrap = zoo.under(model, policy if method.checkpoint else None)
    model = jaxmem.substitute(model) if method.substituted else model
    labels = jax.ShapeDtypeStruct(logits.shape[:-1], jnp.int32)
    rest = statistics, inputs, labels, zoo.KEY

    return _trained(wrap(zoo.loss_of(model)), params, rest, method)


def _pi0_step(batch: int, method: Method) -> Made:
    how = {
        "write": jax.checkpoint if method.checkpoint else lambda layer: layer,
        "change": jaxmem.substitute if method.substituted else lambda loss: loss,
    }
    if method.lora:
        return pi0.lora_step(method.tx, batch, **how)
    dtype = jnp.bfloat16 if method.eight_bit else jnp.float32
    return pi0.full_step(method.tx, batch, dtype, **how)


def _trained(loss: Callable, params: Any, rest: tuple, method: Method) -> Made:
    """The step of a loss of parameters and more, by a method."""
    frozen = None
    if method.lora:
        params, frozen = jaxmem.trainable(params, "**/lora_*")
        frozen = narrow(frozen)
    elif method.eight_bit:
        params = narrow(params)
    tx = method.tx

    of = jaxmem if method.lora else jax
    gradient = of.value_and_grad(loss, has_aux=True)
    rest = (frozen, *rest) if method.lora else rest

    def step(state, *rest):
        params, moments = state
        (value, new), grads = gradient(params, *rest)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value, new

    state = params, jax.eval_shape(tx.init, params)
    return Made(step, (state, *rest), (0,))


# -- rows


def _in_memory_of(known: Known, method: Method, chip: str) -> tuple:
    """(bytes, predicted ms, compiles) under `schedule`."""
    step, args, donated = known.step(method, chip)
    how = {"target": chip, "donate_argnums": donated, "search_seconds": SEARCH}
    room = get_target(chip).memory_bytes
    fits = _plain(known, replace(method, scheduled=False), chip)[0] <= room
    try:
        plan = jaxmem.schedule(step, None if fits else room, **how).plan(*args)
    except BudgetError as error:
        return error.least or "", "", ""
    except (DoesNotFit, TimeoutError) as error:
        print(error)
        return "", "", ""
    ms = milliseconds(plan.scheduled)
    return plan.scheduled.peak_bytes, ms, len(plan.tried)


@functools.cache
def _plain(known: Known, method: Method, chip: str) -> tuple:
    """The same as it is written."""
    step, args, donated = known.step(method, chip)
    jitted = jax.jit(step, donate_argnums=donated)
    try:
        report = jaxmem.estimate(jitted, *args, target=chip)
    except DoesNotFit as error:
        return error.needed_bytes or math.inf, "", 1
    return report.peak_bytes, milliseconds(report), 1


def row(known: Known, method: Method, chip: str) -> tuple:
    found = (_in_memory_of if method.scheduled else _plain)(known, method, chip)
    size, ms, compiles = found
    room = get_target(chip).memory_bytes / GB
    size = size / GB if size and math.isfinite(size) else ""
    batch = f"{known.batch} {known.says}"
    return known.parameters, batch, size, ms, room, compiles


def measures() -> dict[tuple[str, str, str], Callable[[], tuple]]:
    """The first cells of the rows -> what measures the rest."""
    return {
        (name, chip, how): functools.partial(row, known, method, chip)
        for name, known in MODELS.items()
        for chip in CHIPS
        for how, method in METHODS.items()
        if known.lora or not method.lora
    }


if __name__ == "__main__":
    publish_some("needs", COLUMNS, measures(), sys.argv[1:])
