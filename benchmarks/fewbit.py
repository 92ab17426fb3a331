"""Few-bit derivatives: errors of the tables, bytes of a scan with frozen next weights.

    python -m benchmarks.fewbit
    python -m benchmarks.fewbit --package=builtin.npz
    python -m benchmarks.fewbit --scan      # the second table alone
    python -m benchmarks.fewbit --tables    # the first alone, with or without --package

Three tables: the errors of the derivative of the best tables, beside that of the tables
in the package of Few-Bit Backward (its 13 functions, and those of two slopes, which it
has written out) and its threshold; temp bytes of the eight-layer MLP
scan of `benchmarks.models.scans` with its second weights frozen; and the largest error
of the derivative from a rounded output, over every number of a dtype. The package's
tables are read from its file `fewbit/data/builtin.npz`
(https://github.com/skolai/fewbit); without
`--package` their column stays as it was.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from benchmarks._common import MS, TARGETS, publish, published, result_of, size_and_ms
from benchmarks.models import scans
from jaxmem import ops
from jaxmem.ops.few_bit.tables import FUNCTIONS

TABLE_THRESHOLDS = {
    ("gelu_erf", 2): 0.0416,
    ("gelu_erf", 3): 0.0119,
    ("gelu_erf", 4): 0.00315,
    ("silu", 2): 0.0504,
    ("silu", 3): 0.01727,
    ("silu", 4): 0.00456,
}
PACKAGE_NAMES = {"gelu_erf": "gelu"}  # activations that the package calls otherwise
CURVED: dict[str, Callable] = FUNCTIONS | {
    "celu": jax.nn.celu,
    "hardswish": jax.nn.hard_swish,
    "logsigmoid": jax.nn.log_sigmoid,
    "selu": jax.nn.selu,
    "softsign": jax.nn.soft_sign,
    "tanhshrink": lambda x: x - jnp.tanh(x),
}
TWO_SLOPES: dict[str, Callable] = {
    "hardshrink": lambda x: jnp.where(jnp.abs(x) > 0.5, x, 0.0),
    "hardsigmoid": jax.nn.hard_sigmoid,
    "hardtanh": jax.nn.hard_tanh,
    "leaky_relu": jax.nn.leaky_relu,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "softshrink": lambda x: jnp.sign(x) * jnp.maximum(jnp.abs(x) - 0.5, 0.0),
    "threshold": lambda x: jnp.where(x > 0.1, x, 20.0),
}
SCAN_THRESHOLDS = {("gelu, save=2", "h100"): 230}
OUTPUT_THRESHOLDS = {"bfloat16": 0.016, "float32": 1e-4}


def differences(fn, borders, levels) -> np.ndarray:
    """Of any table from the derivative, at even distances over -10 .. 10."""
    x = np.linspace(-10, 10, 2_000_001)
    x = x[~np.isin(x, borders)]  # at a jump itself either side would do
    with jax.enable_x64(True):
        slope = np.asarray(jax.vmap(jax.grad(fn))(x))
    return slope - np.asarray(levels)[np.searchsorted(borders, x, side="right")]


def square_error(fn, borders, levels) -> float:
    """The integral of the squared difference over -10 .. 10."""
    return float(np.mean(differences(fn, borders, levels) ** 2) * 20)


def of_package(path: pathlib.Path) -> dict[tuple[str, int], str]:
    """Squared errors of the package's tables, of the activations that we have too."""
    found = {}
    with np.load(path, allow_pickle=False) as tables:
        for name, fn in CURVED.items():
            for bits in range(1, 5):
                key = f"{PACKAGE_NAMES.get(name, name)}{bits:02}"
                if f"{key}-levels" in tables:
                    inner = tables[f"{key}-borders"][1:-1]  # the outer two are the ends
                    error = square_error(fn, inner, tables[f"{key}-levels"])
                    found[name, bits] = f"{error:.5f}"
    return found


def kept_package() -> dict[tuple[str, int], str]:
    """The same as published."""
    column = TABLE_COLUMNS.index("package")
    return {(r[0], int(r[1])): r[column] for r in published("fewbit-tables")}


def table_rows(package: dict[tuple[str, int], str]):
    for name, fn in (CURVED | TWO_SLOPES).items():
        for bits in [1] if name in TWO_SLOPES else range(1, 5):
            found = ops.fewbit_table(fn, bits)
            largest = np.abs(differences(fn, found.borders, found.levels)).max()
            threshold = TABLE_THRESHOLDS.get((name, bits))
            met = (
                "" if threshold is None else "yes" if found.error <= threshold else "no"
            )
            theirs = package.get((name, bits), "")
            figures = f"{found.error:.6f}", f"{largest:.3f}", theirs
            yield name, bits, *figures, str(threshold or ""), met
    gelu = FUNCTIONS["gelu_erf"]
    error = square_error(gelu, *regelu2_table())
    largest = np.abs(differences(gelu, *regelu2_table())).max()
    yield "regelu2", 2, f"{error:.6f}", f"{largest:.3f}", "", "", ""


def regelu2_table() -> tuple[np.ndarray, np.ndarray]:
    """(borders, levels), read off the op's own derivative."""
    x = np.linspace(-10, 10, 2_000_001, dtype=np.float32)
    slope = np.asarray(jax.vjp(ops.regelu2, jnp.asarray(x))[1](jnp.ones(x.shape))[0])
    jumps = np.flatnonzero(np.diff(slope))
    return x[jumps + 1], np.append(slope[jumps], slope[-1])


ACTIVATIONS = {
    "jax.nn.gelu": jax.nn.gelu,
    "gelu, save=input": ops.gelu,
    "gelu, save=output": partial(ops.gelu, save="output"),
    "gelu, save=4": partial(ops.gelu, save=4),
    "gelu, save=3": partial(ops.gelu, save=3),
    "gelu, save=2": partial(ops.gelu, save=2),
    "regelu2": ops.regelu2,
    "jax.nn.relu": jax.nn.relu,
    "relu, save=bit": partial(ops.relu, save="bit"),
}


def frozen_scan(activation):
    """(step, args): gradients of the input and the first weights; the second frozen."""
    loss, ((first, second), x) = scans.mlp(activation)
    step = jax.grad(lambda w, x, v: loss((w, v), x), argnums=(0, 1))
    return step, (first, x, second)


def temp_and_ms(activation, target: str) -> tuple[float, float]:
    step, args = frozen_scan(activation)
    return size_and_ms(jaxmem.estimate(step, *args, target=target))


def scan_rows():
    for name, activation in ACTIVATIONS.items():
        for target in TARGETS:
            temp, ms = temp_and_ms(activation, target)
            threshold = SCAN_THRESHOLDS.get((name, target))
            yield name, target, temp, ms, threshold or "", result_of(temp, threshold)


def numbers(dtype) -> np.ndarray:
    """Every finite number of a 16-bit dtype; a grid of float32, dense at the minima."""
    if dtype.itemsize == 2:
        every = np.arange(2**16, dtype=np.uint16).view(dtype)
        return every[np.isfinite(every.astype(np.float32))]
    minima = [low + np.linspace(-0.02, 0.02, 200_001) for low in (-0.7525, -1.2785)]
    return np.concatenate([*minima, np.linspace(-20, 20, 400_001)]).astype(np.float32)


def output_error(op, plain, dtype) -> float:
    """The largest error of the derivative, before its own rounding to the dtype."""
    x = jnp.asarray(numbers(jnp.dtype(dtype)))
    got = jax.vjp(jax.jit(op), x)[1](jnp.ones_like(x))[0]
    with jax.enable_x64(True):
        wide = jnp.asarray(np.asarray(x, np.float64))
        want = jax.vmap(jax.grad(plain))(jnp.clip(wide, -1e4, 1e4))
        error = np.abs(np.asarray(got, np.float64) - want)
    rounding = 0.5 * float(jnp.finfo(dtype).eps)
    return float(np.max(error) - rounding)


def output_rows():
    for name, op, plain in (
        ("gelu", ops.gelu, jax.nn.gelu),
        ("silu", ops.silu, jax.nn.silu),
    ):
        for dtype, threshold in OUTPUT_THRESHOLDS.items():
            error = output_error(partial(op, save="output"), plain, dtype)
            met = "yes" if error <= threshold else "no"
            yield name, dtype, f"{error:.2e}", str(threshold), met


TABLE_COLUMNS = (
    *("activation", "bits", "squared error", "largest error", "package"),
    *("at most", "met"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--package", type=pathlib.Path)
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--tables", action="store_true")
    asked = parser.parse_args()
    if not asked.scan:
        errors(asked.package, asked.tables)
    if asked.tables:
        return
    columns = ("activation", "target", "temp MiB", MS, "at most", "met")
    publish("fewbit-scan", columns, list(scan_rows()))


def errors(path: pathlib.Path | None, tables: bool = False) -> None:
    """Of the tables, beside the package's, and of rounded outputs."""
    if path:  # a path is this machine's alone
        sys.argv[1:] = ["--tables"] * tables + [f"--package={path.name}"]
    package = of_package(path) if path else kept_package()
    publish("fewbit-tables", TABLE_COLUMNS, list(table_rows(package)))
    if tables:
        return
    columns = ("save=output", "dtype", "largest error", "at most", "met")
    publish("fewbit-output", columns, list(output_rows()))


if __name__ == "__main__":
    main()
