"""For each subset of trained parameters: what a module keeps is what is needed.

As `tests/ops/test_frozen.py`, with float32 parameters and bfloat16 computation: a
parameter's cast copy is never kept, the input only where it is needed.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxmem
from jaxmem.nn import linen as lean
from jaxmem.nn import nnx as lean_nnx

B, S, D, F = 2, 16, 64, 8
X = jax.ShapeDtypeStruct((B, S, D), jnp.bfloat16)
ROWS, INPUT = B * S, 2 * B * S * D
STATISTICS = 2 * 4 * ROWS  # a mean and a variance a row


def nothing(wanted) -> int:
    return 0


@dataclass(frozen=True)
class Case:
    """A linen module and that of nnx; `needs` and `besides` as in the tests of ops."""

    name: str
    linen: Any
    nnx: Callable[[nnx.Rngs], nnx.Module] | None
    needs: Mapping[str, str] = field(default_factory=dict)
    besides: Callable[[frozenset[str]], int] = nothing
    wanted: tuple[frozenset[str], ...] | None = None

    def subsets(self, names) -> list[frozenset[str]]:
        if self.wanted is not None:
            return list(self.wanted)
        sizes = range(1, len(names) + 1)
        return [frozenset(c) for n in sizes for c in itertools.combinations(names, n)]


LINEAR = {"x": "kernel", "kernel": "x"}
NORM = {"x": "x scale", "scale": "x"}
HALF = dict(dtype=jnp.bfloat16)


def _norm(name, count, nnx_args=(D,), **options):
    besides = lambda wanted: 0 if wanted == {"bias"} else count
    layer = getattr(lean_nnx, name)
    make = lambda rngs: layer(*nnx_args, **HALF, **options, rngs=rngs)
    return Case(name, getattr(lean, name)(**HALF, **options), make, NORM, besides)


# A head's tensors: query, key, value, output; and two float32 a row and head.
HEADS, HEAD_ROWS = 2, 2 * 4 * 2 * ROWS


def _attention_besides(wanted):
    if wanted == {"out/kernel"}:
        return INPUT  # the attention's output
    if wanted == {"out/bias"}:
        return 0
    if wanted == {"value/kernel"}:
        return 2 * INPUT + HEAD_ROWS  # query and key, for the probabilities
    return 4 * INPUT + HEAD_ROWS


CASES = [
    Case(
        "Dense",
        lean.Dense(F, **HALF),
        lambda rngs: lean_nnx.Linear(D, F, **HALF, rngs=rngs),
        LINEAR,
    ),
    Case(
        "DenseGeneral",
        lean.DenseGeneral((2, 4), axis=-1, **HALF),
        lambda rngs: lean_nnx.LinearGeneral(D, (2, 4), **HALF, rngs=rngs),
        LINEAR,
    ),
    Case(
        "Conv",
        lean.Conv(F, (3,), strides=2, **HALF),
        lambda rngs: lean_nnx.Conv(D, F, 3, strides=2, **HALF, rngs=rngs),
        LINEAR,
    ),
    Case(
        "LoRADense",
        lean.LoRADense(F, rank=4, **HALF),
        None,
        {
            "x": "kernel lora_a",
            "kernel": "x",
            # recomputes the thin product where that is not kept
            "lora_a": "x lora_a+lora_b",
            "lora_b": "x lora_a",
        },
        lambda wanted: 2 * ROWS * 4 * ("lora_b" in wanted and "lora_a" not in wanted),
    ),
    _norm("LayerNorm", STATISTICS),
    _norm("RMSNorm", STATISTICS // 2),
    _norm("GroupNorm", 2 * 4 * B * 4, num_groups=4),
    _norm("BatchNorm", 2 * 4 * D, use_running_average=False),
    Case(
        "BatchNorm in inference",
        lean.BatchNorm(use_running_average=True, **HALF),
        lambda rngs: lean_nnx.BatchNorm(
            D, use_running_average=True, **HALF, rngs=rngs
        ),
        {"x": "scale", "scale": "x", "mean": "scale", "var": "x scale"},
    ),
    Case(
        "attention",
        lean.MultiHeadDotProductAttention(HEADS, qkv_features=D, **HALF),
        lambda rngs: lean_nnx.MultiHeadAttention(
            HEADS, D, decode=False, **HALF, rngs=rngs
        ),
        {
            "x": "query/kernel key/kernel value/kernel",
            "query/kernel": "x",
            "key/kernel": "x",
            "value/kernel": "x",
            "out/kernel": "x query/kernel key/kernel value/kernel",
        },
        _attention_besides,
        tuple(
            frozenset({name})
            for name in ("x", "query/kernel", "key/kernel", "value/kernel",
                         "out/kernel", "out/bias")
        ),
    ),
]  # fmt: skip


def flat(tree) -> dict[str, Any]:
    join = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {join(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def linen_call(case: Case):
    """(arrays by path, the call that takes them and x)."""
    variables = jax.eval_shape(case.linen.init, jax.random.key(0), X)
    rest = {k: v for k, v in variables.items() if k != "params"}
    structure = jax.tree.structure(variables["params"])
    # the arrays come back in the order of the tree
    names = list(flat(variables["params"]))
    statistics = flat(rest.get("batch_stats", {}))

    def call(arrays):
        params = structure.unflatten([arrays[name] for name in names])
        given = {"params": params}
        if statistics:
            given["batch_stats"] = {name: arrays[name] for name in statistics}
        return case.linen.apply(given, arrays["x"], mutable=["batch_stats"])[0]

    return {**flat(variables["params"]), **statistics}, call


def nnx_call(case: Case):
    """The same; Flax's nnx norms round their vectors first, and keep those."""
    graph, state = nnx.split(nnx.eval_shape(lambda: case.nnx(nnx.Rngs(0))))
    paths = {"/".join(map(str, p)): p for p, _ in nnx.to_flat_state(state)}
    values = {
        "/".join(map(str, p)): v.get_raw_value() for p, v in nnx.to_flat_state(state)
    }

    def call(arrays):
        pairs = [(path, arrays[name]) for name, path in paths.items()]
        return nnx.merge(graph, nnx.from_flat_state(pairs))(arrays["x"])

    return values, call


def kept(call, arrays, wanted):
    """Names of the arrays kept, and the bytes of what else is."""
    moving, still = (
        {name: x for name, x in arrays.items() if (name in wanted) is ours}
        for ours in (True, False)
    )
    run = lambda moving, still: call({**moving, **still})
    found = jaxmem.residuals(run, moving, still, argnums=0)
    names = {e.operation.split("'")[1] for e in found if e.kind == "argument"}
    return names, sum(e.bytes for e in found if e.kind == "intermediate")


def _is_needed(by: str, wanted: frozenset[str]) -> bool:
    """By one of these words: a gradient, or several together, with a plus."""
    return any(wanted.issuperset(word.split("+")) for word in by.split())


@pytest.mark.parametrize("adapter", [linen_call, nnx_call])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_keeps_what_is_needed(case, adapter):
    if adapter is nnx_call and case.nnx is None:
        pytest.skip("a linen module alone")
    values, call = adapter(case)
    floats = [n for n, v in values.items() if jnp.issubdtype(v.dtype, jnp.inexact)]
    free = ["x", *(n for n in floats if n not in ("mean", "var"))]
    for wanted in case.subsets(free):
        names, besides = kept(call, {"x": X, **values}, wanted)
        needed = {n for n, by in case.needs.items() if _is_needed(by, wanted)}
        rounded = needed & {"scale", "mean", "var"} if adapter is nnx_call else set()
        assert names == needed - rounded, f"{case.name}, {set(wanted)}"
        more = 2 * D * len(rounded)
        assert besides == case.besides(wanted) + more, f"{case.name}, {set(wanted)}"
