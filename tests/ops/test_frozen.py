"""For each subset of differentiated inputs: exactly what is needed is kept.

`test_battery` holds the bytes that ops make and keep. Here also the arguments that they
keep count: inside a model an argument is the output of the layer before, and an op that
holds on to one without need pins it. So each case says for each argument which
gradients need it, from the formula of the derivative, and what is kept besides.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem import ops
from jaxmem._bits import packed_nbytes
from tests.references import nbytes

HALF, WIDE = jnp.bfloat16, jnp.float32
ROWS, D = 6, 128
SIZE = 2 * ROWS * D
STATISTIC = 4 * ROWS  # one float32 a row


def nothing(wanted) -> int:
    return 0


@dataclass(frozen=True)
class Case:
    """An op, its arguments by name, and what each gradient needs.

    `needs` maps an argument to the arguments whose gradients read it; `besides` gives
    the bytes kept beyond arguments, for the set of wanted gradients.
    """

    name: str
    op: Callable[..., Any]
    args: Mapping[str, Any]
    needs: Mapping[str, str] = field(default_factory=dict)
    besides: Callable[[frozenset[str]], int] = nothing
    fixed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    def subsets(self) -> list[frozenset[str]]:
        free = [name for name in self.args if name not in self.fixed]
        sizes = range(1, len(free) + 1)
        return [frozenset(c) for n in sizes for c in itertools.combinations(free, n)]


def row(dtype=HALF):
    return jax.ShapeDtypeStruct((ROWS, D), dtype)


def vector(size=D):
    return jax.ShapeDtypeStruct((size,), WIDE)


def array(*shape, dtype=WIDE):
    return jax.ShapeDtypeStruct(shape, dtype)


def unary(op, kept_input=False, kept=0, name=None):
    needs = {"x": "x"} if kept_input else {}
    return Case(name or op.__name__, op, {"x": row()}, needs, lambda wanted: kept)


def unless_bias_alone(count: int):
    return lambda wanted: 0 if wanted == {"bias"} else count


def keeping_output(guards: int):
    """The output and the guarded channels; a row's variance where x moves."""

    def besides(wanted):
        if wanted == {"bias"}:
            return 0
        guard = guards * (2 * ROWS + 4)
        return SIZE + guard + (STATISTIC if "x" in wanted else 0)

    return besides


BITS = packed_nbytes((ROWS, D))
TWO_BITS = ROWS * D // 4
ACTIVATIONS = [
    *(
        unary(getattr(ops, name), kept=SIZE)
        for name in ("relu", "squared_relu", "softplus", "elu", "leaky_relu")
    ),
    *(unary(getattr(ops, name), kept=SIZE) for name in ("tanh", "sigmoid")),
    unary(ops.mish, kept_input=True),
    *(
        unary(functools.partial(op, save="input"), True, name=f"{op.__name__} input")
        for op in (ops.gelu, ops.silu)
    ),
    *(
        unary(
            functools.partial(op, save="output"),
            kept=SIZE + BITS,
            name=f"{op.__name__} output",
        )
        for op in (ops.gelu, ops.silu)
    ),
    unary(functools.partial(ops.relu, save="bit"), kept=BITS, name="relu bit"),
    *(
        unary(
            functools.partial(op, save=2), kept=TWO_BITS, name=f"{op.__name__} 2 bits"
        )
        for op in (ops.gelu, ops.silu)
    ),
    *(unary(getattr(ops, name), kept=SIZE) for name in ("softmax", "log_softmax")),
    unary(ops.glu, kept_input=True),
    *(
        Case(
            op.__name__,
            op,
            {"gate": row(), "up": row()},
            {"gate": "gate up", "up": "gate"},
        )
        for op in (ops.swiglu, ops.geglu)
    ),
    Case(
        "elu of an array",
        ops.elu,
        {"x": row(), "alpha": array(dtype=HALF)},
        {"x": "x alpha", "alpha": "x"},
    ),
]

AFFINE = {"x": row(), "scale": vector(), "bias": vector()}
NORMS = [
    Case(
        "layer_norm input",
        ops.layer_norm,
        AFFINE,
        {"x": "x scale", "scale": "x"},
        unless_bias_alone(2 * STATISTIC),
    ),
    Case(
        "layer_norm output",
        functools.partial(ops.layer_norm, save="output"),
        AFFINE,
        {"scale": "x scale", "bias": "x scale"},
        keeping_output(D // 64),
    ),
    Case(
        "rms_norm input",
        ops.rms_norm,
        {"x": row(), "scale": vector()},
        {"x": "x scale", "scale": "x"},
        lambda wanted: STATISTIC,
    ),
    Case(
        "rms_norm output",
        functools.partial(ops.rms_norm, save="output"),
        {"x": row(), "scale": vector()},
        {"scale": "x scale"},
        keeping_output(D // 64),
    ),
    Case(
        "group_norm",
        functools.partial(ops.group_norm, num_groups=4),
        AFFINE,
        {"x": "x scale", "scale": "x"},
        unless_bias_alone(2 * 4 * 4 * ROWS),
    ),
    Case(
        "batch_norm training",
        lambda x, scale, bias: ops.batch_norm(x, scale, bias)[0],
        AFFINE,
        {"x": "x scale", "scale": "x"},
        unless_bias_alone(2 * 4 * D),
    ),
    Case(
        "batch_norm inference",
        lambda x, scale, bias, mean, var: ops.batch_norm(
            x, scale, bias, mean=mean, var=var
        ),
        {**AFFINE, "mean": vector(), "var": vector()},
        {"x": "scale", "scale": "x", "mean": "scale", "var": "x scale"},
        fixed=("mean", "var"),
    ),
]

POOLING = [
    Case(
        "max_pool",
        lambda x: ops.max_pool(x, (2, 2), (2, 2)),
        {"x": array(2, 32, 32, 8, dtype=HALF)},
        {},
        lambda wanted: 2 * 16 * 16 * 8 // 4,  # two bits an output
    )
]

LINEAR = [
    Case(
        "dense",
        lambda x, kernel, bias: ops.dense(x, kernel, bias, dtype=x.dtype),
        {"x": row(), "kernel": array(D, 8), "bias": vector(8)},
        {"x": "kernel", "kernel": "x"},
    ),
    Case(
        "conv",
        lambda x, kernel, bias: ops.conv(x, kernel, bias, dtype=x.dtype),
        {
            "x": array(2, 8, 8, 4, dtype=HALF),
            "kernel": array(3, 3, 4, 6),
            "bias": vector(6),
        },
        {"x": "kernel", "kernel": "x"},
    ),
]

KEY = jax.random.key(3)
HEADS = array(2, 16, 2, 8, dtype=HALF)
ATTENTION_ROWS = 2 * 4 * 2 * 2 * 16  # two float32 a query and head


def attention_besides(wanted):
    """The output, where more than the values is wanted."""
    return ATTENTION_ROWS + (0 if wanted == {"value"} else nbytes(HEADS))


def attention_by_blocks(wanted):
    """And the values in the layout they are read in, where no kernel may read them."""
    return attention_besides(wanted) + (0 if wanted == {"value"} else nbytes(HEADS))


QKV = {name: HEADS for name in ("query", "key", "value")}
RANDOM = [
    Case("dropout", lambda x: ops.dropout(x, 0.3, KEY), {"x": row()}, {}, lambda _: 8),
    Case(
        "attention",
        ops.dot_product_attention,
        QKV,
        {
            **dict.fromkeys(("query", "key"), "query key value"),
            "value": "query key",
        },
        attention_besides,
    ),
    Case(
        "attention with bias",
        ops.dot_product_attention,
        {**QKV, "bias": array(1, 2, 16, 16, dtype=HALF)},
        {name: "query key value bias" for name in ("query", "key", "bias")},
        attention_by_blocks,
    ),
]

CASES = ACTIVATIONS + NORMS + POOLING + LINEAR + RANDOM
PAIRS = [(case, wanted) for case in CASES for wanted in case.subsets()]


def kept(case: Case, wanted) -> tuple[set[str], int]:
    """Names of the arguments kept, and bytes of what else is."""
    moving, still = (
        {name: x for name, x in case.args.items() if (name in wanted) is ours}
        for ours in (True, False)
    )
    call = lambda moving, still: case.op(**moving, **still)
    found = jaxmem.residuals(call, moving, still, argnums=0)
    arguments = {e.operation.split("'")[1] for e in found if e.kind == "argument"}
    return arguments, sum(e.bytes for e in found if e.kind == "intermediate")


@pytest.mark.parametrize(
    "case,wanted", PAIRS, ids=[f"{c}-{'-'.join(sorted(w))}" for c, w in PAIRS]
)
def test_keeps_what_is_needed(case, wanted):
    arguments, besides = kept(case, wanted)
    needed = {n for n, by in case.needs.items() if wanted & set(by.split())}
    assert arguments == needed
    assert besides == case.besides(wanted)


def test_batch_norm_in_inference_pins_no_activation():
    """Between two frozen convolutions: what goes through it is not kept at all."""

    def chain(x, kernels, scale, var):
        x = ops.conv(x, kernels[0])
        x = ops.batch_norm(x, scale, scale, mean=scale, var=var)
        return ops.conv(x, kernels[1])

    x, kernels = array(2, 8, 8, 4), [array(3, 3, 4, 4)] * 2
    found = jaxmem.residuals(chain, x, kernels, vector(4), vector(4), argnums=0)
    assert found.total_bytes == 0
    assert not any("x" == e.operation for e in found)
