"""Pallas kernels beside XLA's references: what compiles, what it takes, how fast it is.

    python -m benchmarks.kernels            # without a device: compiles for both chips
    python -m benchmarks.kernels adam norm  # those with such a name; others stay
    python -m benchmarks.kernels --chips    # which of them compile for which chip
    python -m benchmarks.kernels --sass     # clocks of inner loops, from machine code
    python -m benchmarks.kernels --time     # on a GPU or TPU: times, as ratios

"MiB" are the temporaries of forward and backward pass together (of the update, for an
optimizer) beside arguments and results. A limit is what must pass through memory at the
bandwidth that a copy reaches, or the matmul flops at the vendor's rate, whichever takes
longer. Rows of the other modes, and of other chips, are kept.
"""

import argparse
import pathlib
import re
import time
from collections.abc import Callable

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
from benchmarks.readings import sass
from benchmarks.steps.kernels import CASES, MORE_CODE, Case, arguments_of
from jaxmem.chips import CHIPS
from jaxmem.cost.equations import flops
from pallas_kernels.chips import chip_name

NO_KERNEL = "no kernel for the platform"  # in the error of an op that has none
RATES = "one of " + ", ".join(name for name in CHIPS if name != "cpu")
COLUMNS = (
    *("kernel", "chip", "status", "XLA MiB", "kernel MiB"),
    *("XLA ms", "kernel ms", "library ms", "% of limit"),
)


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
        kernel, status = "", str(error).rpartition(": ")[2]
    return [name, target, status, xla, kernel, "", "", "", ""]


# -- on every chip


def on_chip(name: str, target: str) -> str:
    """ "compiles", or what the kernel needs that the chip has not, or "none"."""
    try:
        compiled(CASES[name](), "pallas", target)
    except ValueError as error:
        if NO_KERNEL in str(error):
            return "none"
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


# -- machine code


def sass_table(words: list[str]) -> None:
    """The inner loops of the kernels that the words name, on an H100."""
    for name in sass.TOOLS:
        sass.tool(name)  # before anything is compiled
    cases, target, folder = CASES | MORE_CODE, "h100", sass.dump_here()
    there: dict[str, list] = {}
    for row in published("kernels_sass"):
        there.setdefault(row[0], []).append(row)
    for name in cases:
        if any(word in name for word in words):
            there[name] = sass_rows(name, cases[name](), target, folder)
            for row in there[name]:
                print(*row, flush=True)
    rows = [row for name in cases for row in there.get(name, [])]
    publish("kernels_sass", ("kernel", *sass.COLUMNS), rows)


def sass_rows(name: str, case: Case, target: str, folder: pathlib.Path) -> list[list]:
    """None where the op has no kernel for the target."""
    try:
        kernels = sass.compiled_kernels(case, target, folder)
    except ValueError as error:
        if NO_KERNEL not in str(error):
            raise
        return []
    return [[name, *row] for row in sass.rows_of(kernels)]


# -- on a device


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


def bandwidth(elements: int = 2**28) -> float:
    """Bytes a second of a copy, of 1 GiB by default, read and written."""
    x = jax.random.normal(jax.random.key(0), (elements,))
    return 2e3 * x.nbytes / milliseconds(lambda x: x + 1, (x,))


def chip() -> str:
    """The target that this process's device is."""
    device = jax.devices()[0]
    name = None if device.platform == "cpu" else chip_name(device)
    name = f"tpu-{name}" if device.platform == "tpu" else name
    if name not in CHIPS:
        kind = device.device_kind
        raise SystemExit(f"--time: no rates are known of {kind!r}; run it on {RATES}")
    return name


def time_row(name: str, target: str, rate: float, old: list | None):
    case = CASES[name]()
    args = arguments_of(case)
    donated = () if case.wanted else (0, 1)

    def timed(op) -> float | str:
        copy = jax.tree.map(jnp.copy, args)
        try:
            return milliseconds(case.run(op), copy, donated)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            print(f"{name}: {error}")
            return ""

    xla, kernel = timed(case.fn("xla")), timed(case.fn("pallas"))
    library = timed(next(iter(case.others.values()))) if case.others else ""
    work = jax.make_jaxpr(case.run(case.fn("xla")))(*case.arguments()).eqns
    least = max(case.moved / rate, sum(map(flops, work)) / CHIPS[target].machine.narrow)
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
    parser.add_argument("--sass", action="store_true")
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    if options.chips:
        return chips_table()
    words = options.names or [""]
    as_a_whole()
    if options.sass:
        return sass_table(words)
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
