"""What training a part keeps: plain Flax beside the same model after `substitute`.

    python -m benchmarks.frozen              # bytes kept for the backward pass
    python -m benchmarks.frozen --compiled   # those of the gradient on an H100

The cases are those of Bhatia and Dangel, arXiv 2404.12406: gradients of all parameters,
of the input alone, of the norms, of every fourth layer; and of the late half of the
layers, and LoRA. Batch norm runs in inference mode but where all is trained. "Left" is
what a substituted model keeps. Gradients of all parameters lie in the outputs of a
step, in which XLA has its temporaries too: peaks tell more than temporaries.
"""

import argparse
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxmem
from benchmarks._common import MIB, MS, publish, result_of, size_and_ms
from benchmarks.models.frozen import (
    LLAMA_4,
    EncoderConfig,
    EncoderLayer,
    LlamaLayer,
    Stack,
)
from benchmarks.models.vision import ResNet, ResNetConfig, ViT, ViTConfig
from jaxmem.nn.linen import LoRADense

# In % of what plain training of everything keeps.
THRESHOLDS = {("ResNet-101", "input alone"): 20}
RANK = 16
LARGEST = 6  # modules that are named


def images(size: int):
    return jax.ShapeDtypeStruct((64, size, size, 3), jnp.float32)


def tokens(batch: int, length: int, width: int):
    return jax.ShapeDtypeStruct((batch, length, width), jnp.bfloat16)


class PlainLoRA(nn.Dense):
    """LoRA as a user writes it."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(self.features, self.use_bias, self.dtype, name="base")(x)
        thin = nn.Dense(RANK, use_bias=False, dtype=self.dtype, name="lora_a")(x)
        return y + nn.Dense(
            self.features, use_bias=False, dtype=self.dtype, name="lora_b"
        )(thin)


@dataclass(frozen=True)
class Model:
    """`make(train, dense)` gives the linen module, `x` is its input."""

    name: str
    layers: int
    make: Callable[[bool, Any], nn.Module]
    x: Any
    takes_lora: bool = True


def _stack(config, layer):
    return lambda train, dense: Stack(config, layer, dense)


RESNET, VIT = ResNetConfig(), ViTConfig()
BERT = EncoderConfig()
MODELS = (
    Model("ResNet-101", 33, lambda train, _: ResNet(RESNET, train), images(224), False),
    Model("ViT-B/16", 12, lambda _, dense: ViT(VIT, dense), images(256)),
    Model("BERT-base", 12, _stack(BERT, EncoderLayer), tokens(16, 512, 768)),
    Model("Llama 1B, 4 layers", 4, _stack(LLAMA_4, LlamaLayer), tokens(2, 2048, 2048)),
)


def number_of(path: str) -> int:
    """Of the layer that a parameter is in; -1 for the stem, the head and the like."""
    found = re.match(r"(block|layer)_(\d+)/", path)
    return int(found[2]) if found else -1


# For each case the mask for a number of layers, or None for the gradient of the input.
CASES = {
    "all": lambda layers: True,
    "input alone": None,
    "norms": lambda layers: re.compile("(?i)norm"),
    "every 4th layer": lambda layers: lambda path, _: number_of(path) % 4 == 0,
    "late half": lambda layers: lambda path, _: number_of(path) >= layers // 2,
    "LoRA": lambda layers: re.compile("lora_"),
}


def models(model: Model, case: str) -> Iterator[nn.Module]:
    """Plain and substituted."""
    train, lora = case == "all", case == "LoRA"
    yield model.make(train, PlainLoRA if lora else nn.Dense)
    dense = functools.partial(LoRADense, rank=RANK) if lora else nn.Dense
    lean = model.make(train, dense)
    yield jaxmem.substitute(lean, activations="auto")


def loss_of(module: nn.Module):
    def loss(params, statistics, x):
        variables = {"params": params, **statistics}
        out, _ = module.apply(variables, x, mutable=["batch_stats"])
        return jnp.mean(jnp.square(out.astype(jnp.float32)))

    return loss


def problem(module: nn.Module, x, mask):
    """(loss of (wanted, rest), its arguments): gradients are of the first."""
    statistics = dict(jax.eval_shape(module.init, jax.random.key(0), x))
    params, loss = statistics.pop("params"), loss_of(module)
    if mask is None:
        fn = lambda x, rest: loss(*rest, x)
        return fn, (x, (params, statistics))
    trained, frozen = jaxmem.trainable(params, mask)
    fn = lambda trained, rest: loss(rest[0].merge(trained), *rest[1:])
    return fn, (trained, (frozen, statistics, x))


def problem_of(model: Model, case: str, module: nn.Module):
    mask = CASES[case]
    return problem(module, model.x, mask and mask(model.layers))


class Row(NamedTuple):
    """MiB, plain and substituted, and further cells."""

    plain: float
    substituted: float
    more: tuple


def kept(model: Model, case: str) -> Row:
    """What JAX keeps, plain and substituted, and of what the latter is."""
    plain, lean = (
        jaxmem.residuals(fn, *args, argnums=0)
        for fn, args in (problem_of(model, case, m) for m in models(model, case))
    )
    return Row(plain.total_bytes / MIB, lean.total_bytes / MIB, (left(lean),))


def left(found: jaxmem.memory.Residuals) -> str:
    """The modules whose arrays are kept, with MiB; the largest."""
    sums: Counter[str] = Counter()
    for one in found:
        if one.kind == "intermediate":
            sums[place_of(one.path)] += one.bytes
    largest = sums.most_common(LARGEST)
    named = [f"{path} {size / MIB:,.0f}" for path, size in largest]
    rest = sum(sums.values()) - sum(size for _, size in largest)
    return ", ".join([*named, f"others {rest / MIB:,.0f}"])


def place_of(path: str) -> str:
    """Modules and op of a path, without the model, the layer and einsum's formulas."""
    parts = [part.removeprefix("jaxmem.") for part in path.split("/")[1:]]
    inner = [p for p in parts if "..." not in p and not number_of(f"{p}/") >= 0]
    return "/".join(inner) or "between modules"


def compiled(model: Model, case: str) -> Row:
    """Temporaries, plain and substituted; peaks and ms of both, and if scheduled."""
    plain, lean = (problem_of(model, case, module) for module in models(model, case))
    how = {"target": "h100", "donate_argnums": ()}
    reports = [
        jaxmem.estimate(jax.value_and_grad(fn), *args, **how)
        for fn, args in (plain, lean)
    ]
    step = jaxmem.schedule(jax.value_and_grad(lean[0]), **how)
    reports.append(step.plan(*lean[1]).scheduled)
    temps = [report.temp_bytes / MIB for report in reports[:2]]
    sizes = (size_and_ms(report, "peak_bytes") for report in reports)
    return Row(*temps, tuple(cell for pair in sizes for cell in pair))


def rows(measure: Callable, names: Sequence[str], cases: Sequence[str]):
    """`cases` begin with "all", to which shares are."""
    for model in (m for m in MODELS if m.name in names):
        training = None
        for case in cases if model.takes_lora else [c for c in cases if c != "LoRA"]:
            plain, lean, more = measure(model, case)
            training = training or plain
            share, threshold = 100 * lean / training, THRESHOLDS.get((model.name, case))
            met = result_of(share, threshold)
            about = 100 * lean / plain, share, threshold or "", met
            yield model.name, case, plain, lean, *about, *more


COLUMNS = (
    "model",
    "gradients of",
    "plain, MiB",
    "substituted, MiB",
    "% of plain",
    "% of plain, all",
    "at most",
    "met",
)


PEAKS = tuple(
    f"{how}{column}"
    for how in ("plain", "substituted", "scheduled too")
    for column in (", peak MiB", f": {MS}")
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiled", action="store_true")
    names = [model.name for model in MODELS]
    if parser.parse_args().compiled:  # minutes each: fewer of them
        measured = rows(compiled, names, ("all", "input alone", "LoRA"))
        publish("frozen_h100", (*COLUMNS, *PEAKS), list(measured))
    else:
        measured = rows(kept, names, list(CASES))
        publish("frozen", (*COLUMNS, "left, MiB"), list(measured))


if __name__ == "__main__":
    main()
