"""Fast: kernels beside XLA and other libraries, forward and backward, by size.

Each pass is timed by itself, since `implementation=None` chooses for each. "% of limit"
is what must pass through memory at the bandwidth that a copy reaches here, or the
matmul flops at the vendor's rate, whichever takes longer, of both passes together.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import kernels
from benchmarks.device import libraries, machine, torch_times
from benchmarks.device.job import Job, NotHere, Rows
from benchmarks.device.right import refusal
from benchmarks.device.timing import Chain, calls, in_turn
from benchmarks.steps import kernels as kernel_cases
from benchmarks.steps.kernels import Case, Size
from jaxmem.cost.equations import flops

BF16, F32 = jnp.bfloat16, jnp.float32
SMALL = Size(tokens=128, width=128, heads=1, words=256, elements=1024)
DIVIDED = (1, 4, 16, 64)  # by which the sizes of training are
ROUNDS = 15
DECISIVE = (
    *("attention, S 8192, dropout", "attention, S 8192, causal", "layer_norm"),
    *("silu, 4 bits", "adam, float32"),
)


def jobs() -> Iterator[Job]:
    for name, make in kernel_cases.CASES.items():
        of = make(SMALL)
        for dtype in (None,) if of.kernel == "adam" else (BF16, F32):
            kind = jax.tree.leaves(of.args)[0].dtype.name
            kind = jnp.dtype(dtype).name if dtype else kind
            value = 80 if dtype == F32 else 300 if name in DECISIVE else 180
            yield Job(
                f"fast: {name}, {kind}" if dtype else f"fast: {name}",
                partial(sizes, name, dtype),
                seconds=70,
                value=value,
                kernel=of.kernel,
                dtype=kind,
            )
    for name, rows in torch_times.KINDS.items():
        yield Job(f"fast: {name}", rows, seconds=40, value=100)


def sizes(name: str, dtype, small: bool) -> Rows:
    """The largest size first; each size is a few rows."""
    how = {} if dtype is None else {"dtype": dtype}
    rate = kernels.bandwidth(2**16 if small else 2**28)
    for by in (1,) if small else DIVIDED:
        size = SMALL if small else kernel_cases.FULL.divided(by)
        case = kernel_cases.CASES[name](size, **how)
        others = {**(case.others or {}), **libraries.others(name)}
        yield from measured(
            Comparison(name, case, rate, 2 if small else ROUNDS, others)
        )


@dataclass(frozen=True)
class Comparison:
    """A case at one size, and those that it is timed beside."""

    name: str
    case: Case
    rate: float  # bytes a second
    small: bool
    others: dict[str, Callable]

    def row(self, side: str, which: str, found: dict[str, Any]) -> dict[str, Any]:
        first = jax.tree.leaves(self.case.args)[0]
        about = {"case": self.name, "kernel": self.case.kernel}
        sized = {"dtype": first.dtype.name, "elements": first.size}
        return {**about, **sized, "side": side, "pass": which, **found}

    def sides(self) -> dict[str, Callable]:
        fn = self.case.fn
        return {"XLA": fn("xla"), "kernel": fn("pallas"), **self.others}


def measured(comparison: Comparison) -> Rows:
    """A row for each side and pass, and the kernel's share of what the chip could."""
    with machine.kernels_here():
        chains, refused = _chains(comparison)
        for side, reason in refused.items():
            yield comparison.row(side, "both", {"refused": reason})
        if "kernel" in refused:
            raise NotHere(refused["kernel"])
        total = 0.0
        for which in ("forward", "backward"):
            sides = {s: both[which] for s, both in chains.items() if which in both}
            found = in_turn(sides, 2 if comparison.small else ROUNDS)
            total += found["kernel"]["ms"] if found else 0.0
            for side, times in found.items():
                own = {"device ms": round(sides[side].device_ms(), 5)}
                yield comparison.row(side, which, times | own)
    yield comparison.row("kernel", "both", {"ms": total, **limit(comparison, total)})


def _chains(comparison: Comparison):
    """(side -> pass -> what times it, side -> why it has none)."""
    chains, refused = {}, {}
    for side, op in comparison.sides().items():
        try:
            chains[side] = compiled(comparison.case, op, comparison.small)
        except Exception as error:  # other libraries raise what they like
            refused[side] = _reason(side, error)
    return chains, refused


def _reason(side: str, error: Exception) -> str:
    """Why a side is not timed; XLA has to be, and the kernel where it is for this."""
    if side == "kernel":
        return refusal(error)
    if side == "XLA":
        raise error
    return f"{type(error).__name__}: {error}"[:300]


def compiled(case: Case, op: Callable, small: bool) -> dict[str, Chain]:
    """`passes`, each of which has run once."""
    found = passes(case, op, small)
    for chain in found.values():
        chain()
    return found


def passes(case: Case, op: Callable, small: bool) -> dict[str, Chain]:
    """Each pass alone; an update of its arguments is one."""
    count = 2 if small else calls(kernel_cases.nbytes(case.arguments()))
    sets = [kernel_cases.arguments_of(case, seed) for seed in range(count)]
    if not case.wanted:
        update = lambda g, key, p, state: op(p, state, g, key)
        return {"forward": Chain(update, [s[2:] for s in sets], [s[:2] for s in sets])}
    cotangents = [(s[0],) for s in sets]
    arguments = [tuple(s[1:]) for s in sets]
    forward = jax.jit(case.forward(op))
    pulls = [(forward(*a)[1],) for a in arguments]
    backward = Chain(lambda pull, g: pull(g), pulls, cotangents)
    ahead = Chain(case.forward(op), arguments, [()] * count)
    return {"forward": ahead, "backward": backward}


def limit(comparison: Comparison, ms: float) -> dict[str, float]:
    """The least time that both passes can take, and its share of what they take."""
    case, rates = comparison.case, machine.rates()
    work = jax.make_jaxpr(case.run(case.fn("xla")))(*case.arguments()).eqns
    least = case.moved / comparison.rate
    if rates is not None:
        least = max(least, sum(map(flops, work)) / rates.narrow)
    return {"limit ms": 1e3 * least, "% of limit": 1e5 * least / ms}
