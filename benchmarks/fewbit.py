"""Few-bit derivatives: errors of the tables, bytes of a scan with frozen next weights.

    python -m benchmarks.fewbit

Three tables: the squared error of the derivative of the best tables, beside that of
the tables in the package of Few-Bit Backward and its bar; temp bytes of the eight-layer
MLP scan of `benchmarks.scans` with its second weights frozen; and the largest error of
the derivative from a rounded output, over every number of a dtype.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from benchmarks import scans
from benchmarks._common import MIB, TARGETS, publish, verdict
from jaxmem import ops
from jaxmem.ops._fewbit_shipped import FUNCTIONS

TABLE_BARS = {
    ("gelu_erf", 2): 0.0416,
    ("gelu_erf", 3): 0.0119,
    ("gelu_erf", 4): 0.00315,
    ("silu", 2): 0.0504,
    ("silu", 3): 0.01727,
    ("silu", 4): 0.00456,
}
# (borders, levels) of the package `fewbit`, to the digits its file has them
PACKAGE = {
    ("gelu_erf", 2): ((-0.4536, 0, 0.4536), (-0.00148, 0.32506, 0.67495, 1.00148)),
    ("gelu_erf", 3): (
        (-2.4166, -0.7100, -0.3258, 0.0001, 0.3261, 0.7102, 2.4145),
        (-0.00019, -0.08828, 0.12568, 0.37231) + (0.62785, 0.87445, 1.08835, 1.0002),
    ),
    ("silu", 2): ((-0.7433, 0, 0.7433), (-0.0024, 0.3223, 0.6777, 1.0024)),
}
SCAN_BARS = {("gelu, save=2", "h100"): 230}
OUTPUT_BARS = {"bfloat16": 0.016, "float32": 1e-4}


def square_error(fn, borders, levels) -> float:
    """The squared L2 distance of any table from the derivative, over -10 .. 10."""
    x = np.linspace(-10, 10, 2_000_001)
    with jax.enable_x64(True):
        slope = np.asarray(jax.vmap(jax.grad(fn))(x))
    steps = np.asarray(levels)[np.searchsorted(borders, x, side="right")]
    return float(np.mean((slope - steps) ** 2) * 20)


def table_rows():
    for name, fn in FUNCTIONS.items():
        for bits in range(1, 5):
            error = ops.fewbit_table(fn, bits).error
            package = PACKAGE.get((name, bits))
            theirs = f"{square_error(fn, *package):.5f}" if package else ""
            bar = TABLE_BARS.get((name, bits))
            met = "" if bar is None else "yes" if error <= bar else "no"
            yield name, bits, f"{error:.6f}", theirs, str(bar or ""), met


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


def temp_mib(activation, target: str) -> float:
    step, args = frozen_scan(activation)
    return jaxmem.estimate(step, *args, target=target).temp_bytes / MIB


def scan_rows():
    for name, activation in ACTIVATIONS.items():
        for target in TARGETS:
            temp = temp_mib(activation, target)
            bar = SCAN_BARS.get((name, target))
            yield name, target, temp, bar or "", verdict(temp, bar)


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
        for dtype, bar in OUTPUT_BARS.items():
            error = output_error(partial(op, save="output"), plain, dtype)
            met = "yes" if error <= bar else "no"
            yield name, dtype, f"{error:.2e}", str(bar), met


def main() -> None:
    columns = ("activation", "bits", "squared error", "package", "at most", "met")
    publish("fewbit-tables", columns, list(table_rows()))
    columns = ("save=output", "dtype", "largest error", "at most", "met")
    publish("fewbit-output", columns, list(output_rows()))
    columns = ("activation", "target", "temp MiB", "at most", "met")
    publish("fewbit-scan", columns, list(scan_rows()))


if __name__ == "__main__":
    main()
