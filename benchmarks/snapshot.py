"""What jaxmem makes of twenty steps, to hold a change to that should change nothing.

    python -m benchmarks.snapshot write before.json        # all that can be built
    python -m benchmarks.snapshot check before.json        # exits 1 where one differs
    python -m benchmarks.snapshot check before.json gpt2   # one of them

For each step: its plan in numbers, a hash of the scheduled jaxpr without the names of
functions, and the compiled bytes of every candidate, plain and scheduled. Those of
other libraries need the extra `foreign`. The file is valid for one version of jax.
"""

import functools
import hashlib
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks.models import foreign as foreign_models
from benchmarks.models import zoo
from benchmarks.models.transformers import BertConfig, StackConfig
from benchmarks.models.zoo_transformers import GPT2, Llama, MaskedBert
from benchmarks.steps.train import train_step

SDS = jax.ShapeDtypeStruct
WORDS = 2048  # in vocabularies: layers, not logits, are to take the most
Made = tuple[Callable, tuple[Any, ...]]  # a step and its arguments, the first donated


@dataclass(frozen=True)
class Case:
    """A step and how it is scheduled.

    Attributes:
      make: gives the step and its arguments.
      target: a chip.
      share: of the plain step's temporaries that the budget allows; None for no budget.
      options: further ones of `schedule`.
    """

    make: Callable[[], Made]
    target: str = "h100"
    share: float | None = None
    options: tuple[tuple[str, Any], ...] = (("donate_argnums", 0),)


def _trained(model, inputs, tx=zoo.OPTIMIZER) -> Made:
    state, logits = zoo.abstract(model, inputs, tx)
    labels = SDS(logits.shape[:-1], jnp.int32)
    return zoo.train_step(model, tx), (state, inputs, labels, zoo.KEY)


def _gpt2(layers: int, scanned: bool, tx=zoo.OPTIMIZER) -> Made:
    config = StackConfig(layers, 256, 4, 4, 1024)
    return _trained(
        GPT2(config, scanned, vocabulary=WORDS), SDS((8, 512), jnp.int32), tx
    )


def _bert(layers: int, scanned: bool) -> Made:
    config = BertConfig(layers, 256, 4, 1024, WORDS)
    return _trained(MaskedBert(config, scanned), SDS((8, 256), jnp.int32))


def _llama(layers: int) -> Made:
    config = StackConfig(layers, 256, 4, 2, 1024, dropout=0.0)
    return _trained(Llama(config, True, vocabulary=WORDS), SDS((4, 512), jnp.int32))


def _substituted(layers: int) -> Made:
    config = StackConfig(layers, 256, 4, 4, 1024)
    model = jaxmem.substitute(GPT2(config, True, vocabulary=WORDS))
    return _trained(model, SDS((8, 512), jnp.int32))


def _zoo(name: str, batch: int) -> Made:
    step, args, _ = zoo.step(name, batch)
    return step, args


def _recurrent() -> Made:
    """An LSTM cell over 128 steps, written as a scan."""

    def loss(params, x):
        def cell(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = (jnp.zeros((32, 256)), jnp.zeros((32, 256)))
        return jnp.mean(jax.lax.scan(cell, start, x)[1] ** 2)

    tx = optax.adam(1e-3)

    params = {name: SDS((256, 1024), jnp.float32) for name in ("x", "h")}
    state = params, jax.eval_shape(tx.init, params)
    return train_step(loss, tx), (state, SDS((128, 32, 256), jnp.float32))


def _accumulated() -> Made:
    """AdamA over four micro-batches of a stack of layers."""

    def loss(params, x, key):
        body = lambda x, w: (x + jnp.tanh(x @ w), None)
        return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

    tx = jaxmem.adama(1e-3)
    params = SDS((8, 256, 256), jnp.float32)
    run = jaxmem.microbatch(loss, tx, 4)

    def step(state, x):
        params, moments, value = run(*state, x)
        return (params, moments), value

    state = params, jax.eval_shape(tx.init, params)
    return step, (state, SDS((1024, 256), jnp.float32))


def _foreign(library: str, family: str) -> Made:
    model = foreign_models.build(library, family, foreign_models.REAL)
    state = jax.eval_shape(lambda: foreign_models.state(model))
    return foreign_models.train_step(model.loss), (state, model.batch, zoo.KEY)


_CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
_TWICE = (("donate_argnums", 0), ("clip", "two_pass"))
_HOST = (("donate_argnums", 0), ("offload", True))

CASES: dict[str, Case] = {
    "gpt2": Case(functools.partial(_gpt2, 2, False)),
    "gpt2 half": Case(functools.partial(_gpt2, 3, False), share=0.5),
    "gpt2 scanned": Case(functools.partial(_gpt2, 6, True)),
    "gpt2 scanned half": Case(functools.partial(_gpt2, 6, True), share=0.5),
    "gpt2 scanned third": Case(functools.partial(_gpt2, 12, True), share=0.3),
    "gpt2 a100": Case(functools.partial(_gpt2, 4, True), "a100", 0.6),
    "gpt2 undonated": Case(functools.partial(_gpt2, 2, True), options=()),
    "gpt2 clipped": Case(functools.partial(_gpt2, 4, True, _CLIPPED)),
    "gpt2 two pass": Case(functools.partial(_gpt2, 4, True, _CLIPPED), options=_TWICE),
    "gpt2 substituted": Case(functools.partial(_substituted, 4)),
    "gpt2 offloaded": Case(functools.partial(_gpt2, 6, True), share=0.4, options=_HOST),
    "bert": Case(functools.partial(_bert, 2, False), share=0.6),
    "bert tpu": Case(functools.partial(_bert, 4, True), "tpu-v5e", 0.5),
    "llama": Case(functools.partial(_llama, 4), share=0.5),
    "llama tpu": Case(functools.partial(_llama, 4), "tpu-v5p"),
    "alexnet": Case(functools.partial(_zoo, "alexnet", 8)),
    "mnasnet": Case(functools.partial(_zoo, "mnasnet", 2)),
    "lstm": Case(_recurrent, share=0.4),
    "adama": Case(_accumulated),
    "adama tpu": Case(_accumulated, "tpu-v5e"),
    "transformers bert": Case(functools.partial(_foreign, "transformers", "bert")),
    "haiku resnet18": Case(functools.partial(_foreign, "haiku", "resnet18")),
}


def _canonical(closed) -> str:
    """A hash of a jaxpr that leaves out the names of functions and their addresses."""
    text = closed.pretty_print(source_info=False, name_stack=False)
    text = re.sub(r"\b(name|debug_info|src|policy|jvp_jaxpr_fun)=[^\s\]]+", "", text)
    text = re.sub(r"<[^<>]*>|0x[0-9a-f]+", "", text)
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:16]


def _rows(found, *names: str) -> list[list[Any]]:
    return [[getattr(row, name) for name in names] for row in found]


def _bytes(report) -> list[int] | None:
    if report is None:
        return None
    return [report.argument_bytes, report.output_bytes, report.temp_bytes]


def measure(case: Case) -> dict[str, Any]:
    """The plan, the jaxpr and the bytes of a case, as plain data."""
    step, args = case.make()
    options = dict(case.options)
    donate = options.get("donate_argnums", ())
    budget = None
    if case.share is not None:
        how = {"target": case.target, "donate_argnums": donate}
        plain = jaxmem.estimate(step, *args, **how)
        left = (1 - case.share) * plain.temp_bytes
        budget = plain.peak_bytes - int(left)
    how = {"target": case.target, "progress": False, **options}
    scheduled = jaxmem.schedule(step, budget, **how)
    plan = scheduled.plan(*args)
    return {
        "gradients": _rows(plan.gradients, "bytes", "shape", "dtype", "released"),
        "residuals": _rows(plan.residuals, "bytes", "shape", "dtype"),
        "recomputed": _rows(
            plan.recomputed, "operation", "shape", "dtype", "times", "flops"
        ),
        "tried": [t.peak for t in plan.tried],
        "predicted": plan.predicted_bytes,
        "offloaded": plan.offloaded_bytes,
        "barriers": plan.barriers,
        "plain": _bytes(plan.plain),
        "scheduled": _bytes(plan.scheduled),
        "jaxpr": _canonical(scheduled.trace(*args).jaxpr),
    }


def _snapshot(names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names or CASES:
        try:
            found = measure(CASES[name])
        except ImportError as error:
            print(f"{name}: left out, {error}", flush=True)
            continue
        # as it comes back from a file: lists for tuples
        yield name, json.loads(json.dumps(found))


def _check(path: pathlib.Path, names: list[str]) -> int:
    known, wrong = json.loads(path.read_text()), 0
    if known["jax"] != jax.__version__:
        raise SystemExit(f"{path} is of jax {known['jax']}, this is {jax.__version__}")
    for name, now in _snapshot(names):
        before = known["steps"].get(name, {})
        differing = [key for key in now if now[key] != before.get(key)]
        wrong += bool(differing)
        print(f"{name}: {', '.join(differing) or 'the same'}", flush=True)
        for key in differing:
            print(f"  {key}: {before.get(key)}\n  now: {now[key]}")
    return int(wrong > 0)


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1] not in ("write", "check"):
        raise SystemExit(__doc__)
    path, names = pathlib.Path(sys.argv[2]), sys.argv[3:]
    if unknown := set(names) - set(CASES):
        raise SystemExit(f"{', '.join(unknown)}: one of {', '.join(CASES)}")
    if sys.argv[1] == "check":
        raise SystemExit(_check(path, names))
    steps: dict[str, Any] = {}
    for name, found in _snapshot(names):
        steps[name] = found
        print(name, found["plain"], found["scheduled"], flush=True)
        path.write_text(json.dumps({"jax": jax.__version__, "steps": steps}, indent=1))


if __name__ == "__main__":
    main()
