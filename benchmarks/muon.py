"""Muon beside that of optax: bytes, bytes sent, predicted milliseconds.

    python -m benchmarks.muon                 # everything
    python -m benchmarks.muon "8 bits" step   # rows that have both words; others stay

The Llama of `benchmarks.low_bit`: 16 scanned layers of width 2048, remat, float32
parameters, on an H100. "step": a whole one, of B 1 S 512, all donated. "update": the
optimizer alone on 8 devices, parameters and gradients sharded over them along the first
axis of each matrix; "sent" is what a device sends. Kernels of attention are matrices
over all heads; norms and embeddings take AdamW.
"""

import functools
import math
import sys
from collections.abc import Callable

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
from benchmarks._common import MIB, publish_some, size_and_ms
from benchmarks.low_bit import LLAMA_TOKENS, Llama, llama_step
from benchmarks.models.transformers import abstract_params
from jaxmem.optim import abstract_state, muon

TARGET, DEVICES = "h100", 8
STEP, UPDATE = "step", f"update, {DEVICES} devices"


def numbers(params):
    """Dimension numbers of stacked matrices; None for what takes AdamW."""
    of = optax.contrib.MuonDimensionNumbers

    def one(path, p):
        if p.ndim == 4:  # [layers, in, heads, size], but [layers, heads, size, out]
            heads_first = "'out'" in jax.tree_util.keystr(path)
            return of((1, 2), 3) if heads_first else of(1, (2, 3))
        return of(1, 2) if p.ndim == 3 else None

    return jax.tree_util.tree_map_with_path(one, params)


def ours(**how):
    return muon(2e-2, muon_weight_dimension_numbers=numbers, **how)


def optax_muon(**_):
    return optax.contrib.muon(2e-2, muon_weight_dimension_numbers=numbers)


OPTAX, OURS, GRAM = "optax.contrib.muon", "muon", "muon, gram"
EIGHT, FOUR, IN_TURN = "muon, 8 bits", "muon, 4 bits", "muon, deal=False"
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    OPTAX: optax_muon,
    OURS: ours,
    GRAM: functools.partial(ours, gram=True),
    EIGHT: functools.partial(ours, bits=8),
    FOUR: functools.partial(ours, bits=4),
    IN_TURN: functools.partial(ours, deal=False),
}
CASES = {
    **{(name, STEP): (name,) for name in (OPTAX, OURS, GRAM, EIGHT, FOUR)},
    **{(name, UPDATE): (name,) for name in (OPTAX, OURS, GRAM, EIGHT, IN_TURN)},
}
COLUMNS = (
    *("optimizer", "what", "state MiB", "temp MiB", "peak MiB", "predicted ms"),
    *("sent MiB", "scheduled: temp MiB", "scheduled: peak MiB"),
    *("scheduled: predicted ms",),
)


def bytes_of(tree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def measured(report) -> tuple:
    return report.temp_bytes / MIB, *size_and_ms(report, "peak_bytes")


def of_step(name: str) -> tuple:
    """Of the step as it is written, and as it is scheduled."""
    tx, params = OPTIMIZERS[name](), abstract_params(Llama(), LLAMA_TOKENS)
    moments = abstract_state(tx, params)
    step, args = llama_step(tx), ((params, moments), LLAMA_TOKENS)
    how = {"target": TARGET, "donate_argnums": 0}
    plain = jaxmem.estimate(step, *args, **how)
    plan = jaxmem.schedule(step, **how).plan(*args)
    assert plan.scheduled is not None
    sizes = bytes_of(moments) / MIB, *measured(plain)
    return *sizes, "", *measured(plan.scheduled)


def sharded(params):
    """The parameters, along the first axis of each matrix."""
    mesh = jaxmem.target_mesh(TARGET, (DEVICES,), ("data",))

    def one(p):
        spec = PartitionSpec(*[None] * (p.ndim > 1), "data")
        return p.update(sharding=NamedSharding(mesh, spec))

    return jax.tree.map(one, params)


def of_update(name: str) -> tuple:
    """Of the update alone, on several devices."""
    params = sharded(abstract_params(Llama(), LLAMA_TOKENS))
    tx = OPTIMIZERS[name](shardings=jax.tree.map(lambda p: p.sharding, params))
    moments = abstract_state(tx, params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, moments, grads):
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    report = jaxmem.estimate(update, params, moments, params, target=TARGET)
    state = bytes_of(moments) / DEVICES / MIB
    return state, *measured(report), report.sent_bytes / MIB, "", "", ""


if __name__ == "__main__":
    rows = {
        case: functools.partial(of_step if case[1] == STEP else of_update, *given)
        for case, given in CASES.items()
    }
    publish_some("muon", COLUMNS, rows, sys.argv[1:])
