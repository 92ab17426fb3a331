"""LoRA over a base that qwix quantised: what is kept of its weights, and the step.

    python -m benchmarks.quantized_base [words of the rows to measure anew]

An Adam step of the adapters (rank 16), state donated, of tunix's nnx Llama 3 in float32
and of the linen Llama of `frozen_models.py` in bfloat16, both 2,048 wide, on 4
sequences of 512 tokens, compiled for an H100 as the libraries have it, substituted,
scheduled and both. "Wide" are residuals of the shape of a weight. It needs the extra
`foreign`.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import qwix
from flax import nnx

import jaxmem
from benchmarks._common import MIB, MS, compiled, compiled_with_ms, publish_some
from benchmarks.models.foreign import Size, cross_entropy
from benchmarks.models.foreign_tunix import FAMILIES, Family, batch_of, given
from benchmarks.models.frozen import LLAMA_4, LlamaLayer, Stack
from benchmarks.steps.train import flat_step

TARGET = "h100"
RANK = 16
BASES: dict[str, dict[str, Any]] = {
    "not quantized": {"weight_qtype": None},
    "int8": {"weight_qtype": jnp.int8},
    "NF4": {"weight_qtype": "nf4", "tile_size": 64},
}
LLAMA = FAMILIES["llama3"]
WIDTHS = Size(16, 2048, 16, 512, 4, 8192, 0, jnp.bfloat16)
VARIANTS = ("plain", "substituted", "scheduled", "both")
COLUMNS = (
    *("model", "base", "arguments (MiB)", "wide, plain (MiB)"),
    "wide, substituted (MiB)",
    *(column for how in VARIANTS for column in (f"temp {how} (MiB)", f"{how}: {MS}")),
)
OPTIMIZER = optax.adam(1e-3)


@dataclass(frozen=True)
class Problem:
    """The loss of a model, `loss(params, batch)` of all parameters, which are split.

    Attributes:
      loss: of what `frozen.merge(params)` gives, and the batch.
      lean: that of the substituted model.
      split: adapters and base, by `jaxmem.trainable`.
      lean_split: those of the substituted model, where it is the parameters' owner.
      batch: of the loss.
    """

    loss: Callable
    lean: Callable
    split: jaxmem.freezing.SplitParameters
    lean_split: jaxmem.freezing.SplitParameters
    batch: Any

    def of(self, variant: str) -> tuple[Callable, jaxmem.freezing.SplitParameters]:
        """The loss and the parameters of a variant."""
        if variant in ("substituted", "both"):
            return self.lean, self.lean_split
        return self.loss, self.split


def provider(base: str, modules: str, rank: int = RANK, **options) -> Any:
    """qwix's LoRA, with the base as it is named in `BASES`."""
    how = BASES[base] | options
    rule = qwix.LoraRule(module_path=modules, rank=rank, alpha=float(rank), **how)
    return qwix.LoraProvider([rule])


def tunix(
    base: str, size: Size, family: Family = LLAMA, abstract=True, **options
) -> Problem:
    """A model of tunix; abstract: without values, of any size."""
    batch = batch_of(size)
    lora = provider(base, ".*(attn|mlp).*", **options)

    def quantized(model):
        rngs = nnx.Rngs(1)
        return qwix.apply_lora_to_model(model, lora, *given(batch), rngs=rngs)

    def loss(model, batch):
        return cross_entropy(model(*given(batch))[0], batch["labels"])

    make = functools.partial(family.make, size)
    with warnings.catch_warnings():  # they use names that jax and flax deprecate
        warnings.simplefilter("ignore", DeprecationWarning)
        # In two steps: where both are traced in one, qwix does not find the weights
        # that `zeros` makes, and gives them no adapters.
        shapes = nnx.eval_shape
        model = shapes(quantized, shapes(make)) if abstract else quantized(make())
        lean = jaxmem.substitute(model)
    both = (jaxmem.trainable(m, nnx.LoRAParam) for m in (model, lean))
    return Problem(loss, loss, *both, batch)


def linen(base: str, size: Size, abstract=True, **options) -> Problem:
    """The Llama of `frozen_models.py`, on embeddings."""
    sizes = dict(layers=size.layers, width=size.width, heads=size.heads)
    sizes |= dict(hidden=4 * size.width, dtype=size.dtype)
    config = replace(LLAMA_4, **sizes, kv_heads=size.heads // 2)
    lora = provider(base, ".*(query|key|value|out|gate|up|down)", **options)
    model = qwix.apply_lora_to_model(Stack(config, LlamaLayer), lora)
    shape = (size.batch, size.length, size.width)
    x = jax.random.normal(jax.random.key(1), shape, size.dtype)

    def loss_of(model):
        def loss(params, x):
            return jnp.mean(jnp.square(model.apply(params, x).astype(jnp.float32)))

        return loss

    init = functools.partial(model.init, jax.random.key(0))
    params = jax.eval_shape(init, x) if abstract else init(x)
    split = jaxmem.trainable(params, "**/*_lora_*")
    lean = jaxmem.substitute(model)
    return Problem(loss_of(model), loss_of(lean), split, split, x)


MODELS = {
    "tunix Llama 3, 16 layers": (tunix, WIDTHS),
    "linen Llama, 4 layers": (linen, replace(WIDTHS, layers=4)),
}


def step_of(loss: Callable) -> Callable:
    """`step(params, moments, frozen, batch) -> (params, moments, loss)`."""

    return flat_step(jaxmem.value_and_grad(loss), OPTIMIZER)


def arguments(problem: Problem, variant: str) -> tuple:
    """Of the step; moments as shapes where the parameters are."""
    params, frozen = problem.of(variant)[1]
    return params, jax.eval_shape(OPTIMIZER.init, params), frozen, problem.batch


def wrapped(variant: str, loss: Callable) -> Callable:
    """The step, jitted or scheduled."""
    scheduled = variant in ("scheduled", "both")
    wrap = functools.partial(jaxmem.schedule, target=TARGET) if scheduled else jax.jit
    return wrap(step_of(loss), donate_argnums=(0, 1))


def wide_bytes(problem: Problem, variant: str) -> int:
    """Of the residuals that have the shape of a weight of the base."""
    loss, (params, frozen) = problem.of(variant)
    of_adapters = lambda params, frozen, batch: loss(frozen.merge(params), batch)
    args = params, frozen, problem.batch
    found = jaxmem.residuals(of_adapters, *args, argnums=0)
    weights = {x.shape for x in jax.tree.leaves(frozen.params) if x.ndim > 1}
    entries = (e for e in found.entries if e.kind != "argument")
    return sum(e.bytes for e in entries if e.shape in weights)


def measure(model: str, base: str) -> list[float | str]:
    """The cells of a row."""
    make, size = MODELS[model]
    problem = make(base, size)
    found = [wide_bytes(problem, variant) / MIB for variant in VARIANTS[:2]]
    how: dict[str, Any] = {"target": TARGET}
    steps = [(wrapped(v, problem.of(v)[0]), *arguments(problem, v)) for v in VARIANTS]
    given = compiled(*steps[0], what="argument_bytes", **how)
    both = (compiled_with_ms(*step, what="temp_bytes", **how) for step in steps)
    return [given, *found, *(cell for pair in both for cell in pair)]


def main() -> None:
    cases = {
        (model, base): functools.partial(measure, model, base)
        for model in MODELS
        for base in BASES
    }
    publish_some("quantized_base", COLUMNS, cases, sys.argv[1:])


if __name__ == "__main__":
    main()
