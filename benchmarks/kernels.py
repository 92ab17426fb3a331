"""Pallas kernels beside XLA's references: what compiles, what it takes, how fast it is.

    python -m benchmarks.kernels            # without a device: compiles for both chips
    python -m benchmarks.kernels adam norm  # those with such a name; others stay
    python -m benchmarks.kernels --chips    # which of them compile for which chip
    python -m benchmarks.kernels --time     # on a GPU or TPU: times, as ratios

"MiB" are the temporaries of forward and backward pass together (of the update, for an
optimizer) beside arguments and results. A limit is what must pass through memory at the
bandwidth that a copy reaches, or the matmul flops at the vendor's rate, whichever takes
longer. Rows of the other modes, and of other chips, are kept.
"""

import argparse
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks._common import (
    MIB,
    TARGETS,
    Row,
    as_a_whole,
    publish,
    published,
)
from jaxmem import ops
from jaxmem.ir.costs import MACHINES, flops
from pallas_kernels.chips import chip_name

SDS = jax.ShapeDtypeStruct
BF16, F32 = jnp.bfloat16, jnp.float32
TOKENS, WIDTH = 8192, 4096
RATES = "one of " + ", ".join(name for name in MACHINES if name != "cpu")
COLUMNS = (
    *("kernel", "chip", "status", "XLA MiB", "kernel MiB"),
    *("XLA ms", "kernel ms", "library ms", "% of limit"),
)


@dataclass(frozen=True)
class Case:
    """An op at a size that training has.

    Attributes:
      fn: `fn(implementation)` is the op of `args`.
      args: shapes and dtypes.
      wanted: positions that are differentiated; none for an update of its arguments.
      moved: bytes that forward and backward pass must read and write.
      library: the nearest op of another library, of the same arguments.
    """

    fn: Callable[[str], Callable]
    args: tuple[Any, ...]
    wanted: tuple[int, ...]
    moved: int
    library: Callable | None = None

    def run(self, op: Callable) -> Callable:
        """Values and gradients, as one function of cotangents and arguments."""
        if not self.wanted:
            return op

        def both(cotangents, *args):
            def some(*chosen):
                whole = dict(enumerate(args)) | dict(
                    zip(self.wanted, chosen, strict=True)
                )
                return op(*whole.values())

            out, pull = jax.vjp(some, *(args[i] for i in self.wanted))
            return out, pull(cotangents)

        return both

    def arguments(self) -> tuple[Any, ...]:
        """Of what `run` gives."""
        if not self.wanted:
            return self.args
        return jax.eval_shape(self.fn("xla"), *self.args), *self.args


def nbytes(*shapes) -> int:
    return sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(shapes))


def attention_case(length: int, rate: float, causal: bool) -> Case:
    x = SDS((1, length, 16, 64), BF16)
    key = SDS((2,), jnp.uint32)

    def fn(implementation):
        return lambda q, k, v, key: ops.dot_product_attention(
            *(q, k, v),
            is_causal=causal,
            dropout_rate=rate,
            dropout_rng=key if rate else None,
            implementation=implementation,
        )

    library = lambda q, k, v, key: jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, implementation="cudnn"
    )
    return Case(fn, (x, x, x, key), (0, 1, 2), 12 * nbytes(x), library)


def elementwise_case(op, arrays: int, kept: float, **options) -> Case:
    """`kept` bytes an element pass from the forward to the backward pass."""
    x = SDS((TOKENS, WIDTH), BF16)
    fn = lambda implementation: partial(op, implementation=implementation, **options)
    through = (2 + 3 * (arrays - 1)) * nbytes(x) + 2 * nbytes(x)  # both passes
    moved = through + round(2 * kept * x.size)
    return Case(fn, (x,) * arrays, tuple(range(arrays)), moved)


def norm_case(op, vectors: int, **options) -> Case:
    x, v = SDS((TOKENS, WIDTH), BF16), SDS((WIDTH,), F32)
    fn = lambda implementation: partial(op, implementation=implementation, **options)
    args = x, *(v,) * vectors
    return Case(fn, args, tuple(range(len(args))), 5 * nbytes(x))


def residual_case() -> Case:
    x, v, key = SDS((TOKENS, WIDTH), BF16), SDS((WIDTH,), F32), SDS((2,), jnp.uint32)

    def fn(implementation):
        return lambda x, r, scale, bias, key: ops.dropout_add_layer_norm(
            *(x, r, scale, bias), rate=0.1, rng=key, implementation=implementation
        )

    return Case(fn, (x, x, v, v, key), (0, 1, 2, 3), 9 * nbytes(x))


def cross_entropy_case() -> Case:
    x, w = SDS((TOKENS, WIDTH), BF16), SDS((WIDTH, 32 * 1024), BF16)
    labels = SDS((TOKENS,), jnp.int32)
    fn = lambda implementation: partial(
        ops.linear_cross_entropy, implementation=implementation
    )
    return Case(fn, (x, w, labels), (0, 1), 2 * nbytes(x, w))


def adam_case(dtype) -> Case:
    p, m, key = SDS((2**26,), dtype), SDS((2**26,), F32), SDS((2,), jnp.uint32)
    state = jax.eval_shape(jaxmem.optim.FusedAdam(1e-3).init, p)

    def fn(implementation):
        adam = jaxmem.optim.FusedAdam(1e-3, implementation=implementation)
        return lambda p, state, g, key: adam.step(g, state, p, rng=key)

    return Case(fn, (p, state, p, key), (), nbytes(p, m, m) * 2 + nbytes(p))


CASES = {
    "attention, S 8192, dropout": partial(attention_case, TOKENS, 0.1, False),
    "attention, S 8192, causal": partial(attention_case, TOKENS, 0.0, True),
    "layer_norm": partial(norm_case, ops.layer_norm, 2),
    "layer_norm, output": partial(norm_case, ops.layer_norm, 2, save="output"),
    "rms_norm": partial(norm_case, ops.rms_norm, 1),
    "dropout_add_layer_norm": residual_case,
    "gelu, output and a bit": partial(
        elementwise_case, ops.gelu, 1, 2 + 1 / 8, save="output"
    ),
    "gelu, 2 bits": partial(elementwise_case, ops.gelu, 1, 2 / 8, save=2),
    "silu, 4 bits": partial(elementwise_case, ops.silu, 1, 4 / 8, save=4),
    "geglu": partial(elementwise_case, ops.geglu, 2, 0.0),
    "swiglu": partial(elementwise_case, ops.swiglu, 2, 0.0),
    "linear_cross_entropy": cross_entropy_case,
    "adam, float32": partial(adam_case, F32),
    "adam, bfloat16 at random": partial(adam_case, BF16),
}


def compiled(case: Case, implementation: str, target: str) -> float:
    """MiB of temporaries."""
    donated = () if case.wanted else (0, 1)
    step = jax.jit(case.run(case.fn(implementation)), donate_argnums=donated)
    return jaxmem.estimate(step, *case.arguments(), target=target).temp_bytes / MIB


def compile_row(name: str, target: str):
    case = CASES[name]()
    xla = compiled(case, "xla", target)
    try:
        kernel, status = compiled(case, "pallas", target), "compiles"
    except (ValueError, NotImplementedError) as error:
        kernel, status = "", str(error).rpartition(". ")[2]
    return [name, target, status, xla, kernel, "", "", "", ""]


# -- on every chip


def on_chip(name: str, target: str) -> str:
    """ "compiles", or what the kernel needs that the chip has not."""
    try:
        compiled(CASES[name](), "pallas", target)
    except ValueError as error:
        missing = re.search("the pallas kernel needs (.*), this is", str(error))
        if missing is None:
            raise
        return f"needs {missing[1]}"
    return "compiles"


def chips_table() -> None:
    """Every kernel on every target."""
    names = [target.name for target in jaxmem.targets() if target.platform != "cpu"]
    rows = [[name, *(on_chip(name, target) for target in names)] for name in CASES]
    publish("kernels_chips", ("kernel", *names), rows)


# -- on a device


def filled(shape: Any, seed: int = 0):
    """An array of this shape: normal numbers, or what its dtype makes of them."""
    x = jax.random.normal(jax.random.key(seed), shape.shape, F32)
    if jnp.issubdtype(shape.dtype, jnp.floating):
        return x.astype(shape.dtype)
    return (jnp.abs(x) * 1000).astype(shape.dtype)


def milliseconds(fn: Callable, args, donated=(), repeats: int = 20) -> float:
    """The median of some calls, each waited for; what is donated is passed on."""
    run = jax.jit(fn, donate_argnums=donated)
    times = []
    for _ in range(repeats + 3):
        begin = time.perf_counter()
        out = jax.block_until_ready(run(*args))
        times.append(1e3 * (time.perf_counter() - begin))
        if donated:
            args = *out, *args[len(out) :]
    return sorted(times[3:])[repeats // 2]


def bandwidth() -> float:
    """Bytes a second of a copy of 1 GiB, read and written."""
    x = jnp.zeros(2**28, F32)
    return 2e3 * x.nbytes / milliseconds(lambda x: x + 1, (x,))


def chip() -> str:
    """The target that this process's device is."""
    device = jax.devices()[0]
    name = None if device.platform == "cpu" else chip_name(device)
    name = f"tpu-{name}" if device.platform == "tpu" else name
    if name not in MACHINES:
        kind = device.device_kind
        raise SystemExit(f"--time: no rates are known of {kind!r}; run it on {RATES}")
    return name


def time_row(name: str, target: str, rate: float, old: list | None):
    case = CASES[name]()
    args = jax.tree.map(filled, case.arguments())
    donated = () if case.wanted else (0, 1)

    def timed(op) -> float | str:
        copy = jax.tree.map(jnp.copy, args)
        try:
            return milliseconds(case.run(op), copy, donated)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            print(f"{name}: {error}")
            return ""

    xla, kernel = timed(case.fn("xla")), timed(case.fn("pallas"))
    library = timed(case.library) if case.library else ""
    work = jax.make_jaxpr(case.run(case.fn("xla")))(*case.arguments()).eqns
    least = max(case.moved / rate, sum(map(flops, work)) / MACHINES[target].narrow)
    share = 1e5 * least / kernel if isinstance(kernel, float) else ""
    before = old[2:5] if old else ["", "", ""]
    return [name, target, *before, xla, kernel, library, share]


def numbers(row: Row) -> Row:
    """A published row, its figures as numbers."""
    return Row([*row[:3], *map(number, row[3:])], row.commit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--chips", action="store_true")
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    if options.chips:
        return chips_table()
    words = options.names or [""]
    as_a_whole()
    chosen = [n for n in CASES if any(word in n for word in words)]
    there = {(r[0], r[1]): numbers(r) for r in published("kernels")}
    if options.time:
        target, rate = chip(), bandwidth()
        for name in chosen:
            old = there.get((name, target))
            there[name, target] = time_row(name, target, rate, old)
    else:
        for target in TARGETS:
            for name in chosen:
                row = compile_row(name, target)
                old = there.get((name, target))
                there[name, target] = [*row[:5], *(old[5:] if old else row[5:])]
                print(*there[name, target], flush=True)
    rows = sorted(there.values(), key=lambda r: (r[1], list(CASES).index(r[0])))
    publish("kernels", COLUMNS, rows)


def number(text: str) -> float | str:
    return float(text) if text else ""


if __name__ == "__main__":
    main()
