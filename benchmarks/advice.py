"""`jaxmem.advise` at two and four times the largest batch that fits in 16 GiB plainly.

    python -m benchmarks.advice

Compiled for an H100, Adam, layers in `nn.scan`. A row is a measure that was compiled;
the last of a model is the first that fits. The bytes are those of the compiled step.
The blocks of Llama-1B have parameters and moments in bfloat16, and 512 tokens: in
float32, or of 2,048 tokens, not one example fits plainly.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._common import MIB, publish
from benchmarks.models.transformers import (
    GPT2_MEDIUM,
    LLAMA_1B,
    VIT_LARGE,
    Bert,
    BertConfig,
    LlamaLayer,
    PreLNLayer,
    Stack,
    abstract_params,
    masked_loss,
    mean_square,
)
from jaxmem.advising import Advice
from jaxmem.advising.forms import step_args, step_of

TARGET, BUDGET = "h100", "16GiB"
TIMES = 2, 4
TX = optax.adam(1e-3)
COLUMNS = (
    *("model", "plain batch", "batch", "measure", "peak MiB", "recomputed Gflops"),
    *("recomputed ms", "fits", "compiled MiB"),
)


class Model(NamedTuple):
    """A loss `(params, x, key)`, its parameters, and a batch of n examples."""

    loss: Callable
    params: Any
    inputs: Callable[[int], Any]


def bert() -> Model:
    tokens = lambda n: jax.ShapeDtypeStruct((n, 512), jnp.int32)
    model = Bert(BertConfig())
    return Model(masked_loss(model), abstract_params(model, tokens(1)), tokens)


def stack(config, layer, positions: int, dtype=jnp.float32) -> Model:
    shape = positions, config.width
    rows = lambda n: jax.ShapeDtypeStruct((n, *shape), config.dtype)
    model = Stack(config, layer)
    params = abstract_params(model, rows(1))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), params)
    return Model(mean_square(model), params, rows)


MODELS: dict[str, Callable[[], Model]] = {
    "BERT-Large, 512 tokens": bert,
    "GPT-2 medium blocks, 1024 tokens": lambda: stack(GPT2_MEDIUM, PreLNLayer, 1024),
    "ViT-L blocks, 256 tokens": lambda: stack(VIT_LARGE, PreLNLayer, 256),
    "Llama-1B blocks, 512 tokens, bfloat16": lambda: stack(
        LLAMA_1B, LlamaLayer, 512, jnp.bfloat16
    ),
}


def loss_of(model: Model) -> Callable:
    """With the bits of a key, which an abstract argument can be."""

    def loss_fn(params, x, bits):
        return model.loss(params, x, jax.random.wrap_key_data(bits))

    return loss_fn


def arguments(model: Model, batch: int) -> tuple[Any, Any, Any]:
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return model.params, model.inputs(batch), key


def largest(model: Model) -> int:
    """The largest batch of the step as one writes it."""
    step = step_of(loss_of(model), TX)
    args = lambda n: step_args(TX, arguments(model, n))
    how = {"donate_argnums": (0, 1), "progress": False}
    return jaxmem.max_batch(step, args, TARGET, BUDGET, **how)


def advised(model: Model, batch: int) -> Advice:
    how = {"tx": TX, "target": TARGET, "budget": BUDGET, "progress": False}
    return jaxmem.advise(loss_of(model), *arguments(model, batch), **how)


def compiled(model: Model, batch: int, advice: Advice) -> float:
    """MiB of the step that the advised lines make, compiled once more."""
    env: dict[str, Any] = {"jaxmem": jaxmem, "loss_fn": loss_of(model)}
    lines = advice.code.splitlines()
    of_step = [line for line in lines if line.startswith("step = ")]
    exec("\n".join(line for line in lines if line not in of_step), env)
    env["step"] = step_of(env["loss_fn"], TX)
    exec("\n".join(of_step), env)
    args = step_args(TX, arguments(model, batch))
    how = {"target": TARGET, "donate_argnums": (0, 1)}
    return jaxmem.estimate(env["step"], *args, **how).peak_bytes / MIB


def rows(name: str) -> Iterator[Sequence]:
    model = MODELS[name]()
    plain = largest(model)
    assert plain, "no batch fits"
    for times in TIMES:
        batch = times * plain
        advice = advised(model, batch)
        for one in advice.measures:
            peak = "" if one.peak_bytes is None else one.peak_bytes / MIB
            again = compiled(model, batch, advice) if one is advice.taken else ""
            cost = one.recomputed_flops / 1e9, 1e3 * one.recomputed_seconds
            yield name, plain, batch, one.name, peak, *cost, one.fits, again


if __name__ == "__main__":
    publish("advice", COLUMNS, [row for name in MODELS for row in rows(name)])
