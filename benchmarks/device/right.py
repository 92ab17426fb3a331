"""Right: each kernel's values and gradients beside XLA's and a float32 reference.

A kernel may be off from the reference by four roundings of the largest element and by
twice what XLA's path is off in the same dtype, as the tests have it. Masks of dropout
are equal to the bit. A sanitizer of the GPU looks at small sizes where it is installed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device import attention_rules
from benchmarks.device.job import Job, NotHere, Rows
from benchmarks.device.machine import kernels_here
from benchmarks.steps import kernels as kernel_cases
from benchmarks.steps.kernels import Case, Size
from jaxmem import ops

BF16, F32 = jnp.bfloat16, jnp.float32
RAGGED = Size(tokens=1000, width=1152, heads=2, words=4096 + 64, elements=100_003)
SMALL = Size(tokens=128, width=128, heads=1, words=256, elements=1024)
MEMCHECK = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
RACECHECK = ("compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "9")


SANITIZED = (
    *("attention, even", "attention, all at once", "layer_norm"),
    *("gelu, output and a bit", "adam, float32"),
)


@dataclass(frozen=True)
class Look:
    """What is looked at of a kernel."""

    kernel: str
    rows: Callable[[bool], Rows]


def jobs() -> Iterator[Job]:
    found = looks()
    for name, look in found.items():
        how = {"seconds": 25, "value": 150, "kernel": look.kernel}
        yield Job(f"right: {name}", look.rows, **how)
    for tool in (MEMCHECK, RACECHECK):
        for name in SANITIZED:
            what, look = f"right: {tool[2]}, {name}", found[name]
            how = {"under": tool, "small": True, "seconds": 90, "value": 100}
            yield Job(what, look.rows, kernel=look.kernel, **how)


def looks() -> dict[str, Look]:
    """By name."""
    found: dict[str, Look] = {}
    for name in attention_rules.RULES:
        rows = partial(in_dtypes, partial(attention_rules.case, name))
        found[f"attention, {name}"] = Look("attention", rows)
    for name, make in kernel_cases.CASES.items():
        kernel, sized = make(SMALL).kernel, partial(_sized, make)
        if name.startswith("adam"):
            found[name] = Look(kernel, partial(in_dtypes, sized, dtypes=(None,)))
        elif kernel != "attention":  # of which there are more above
            found[name] = Look(kernel, partial(in_dtypes, sized))
    for kernel, draws in MASKS.items():
        found[f"mask of {kernel}"] = Look(kernel, partial(same_mask, draws))
    return found


def _sized(make: Callable[..., Case], small: bool, dtype) -> Case:
    how = {} if dtype is None else {"dtype": dtype}
    return make(SMALL if small else RAGGED, **how)


def in_dtypes(
    make: Callable[..., Case], small: bool, dtypes: Sequence = (BF16, F32)
) -> Rows:
    """The rows of each dtype that the platform's kernel takes."""
    refused, off = [], []
    for dtype in dtypes:
        case = make(small, dtype)
        try:
            yield from compared(case)
        except Off as error:
            off.append(f"{dtype and jnp.dtype(dtype).name}: {error}")
        except (ValueError, NotImplementedError) as error:
            refused.append(refusal(error))
            yield {**_about(case), "refused": refused[-1]}
    if off:
        raise RuntimeError("; ".join(off))
    if len(refused) == len(dtypes):
        raise NotHere(refused[-1])


class Off(Exception):
    """Results that are further from the reference than is allowed."""


def refusal(error: Exception) -> str:
    """Why a kernel is not for this; another error is raised as it is."""
    text = str(error)
    said = ("implementation='pallas'", "the pallas kernel needs")
    if isinstance(error, NotImplementedError) or any(word in text for word in said):
        return text[:300]
    raise error


def _about(case: Case) -> dict[str, Any]:
    first = jax.tree.leaves(case.args)[0]
    return {"kernel": case.kernel, "dtype": first.dtype.name, "shape": first.shape}


def compared(case: Case) -> Rows:
    """A row for each result; `Off` after the last if one is."""
    args = kernel_cases.arguments_of(case)
    with kernels_here():
        got = jax.block_until_ready(jax.jit(case.run(case.fn("pallas")))(*args))
    plain = jax.jit(case.run(case.fn("xla")))
    want = plain(*args)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(case.run(case.fn("xla")))(*jax.tree.map(_widened, args))
    stated = case.stated.get(jax.tree.leaves(case.args)[0].dtype.name, 0.0)
    more = stated * float(jnp.abs(jax.tree.leaves(args)[0].astype(F32)).max())
    rows = [
        {**_about(case), "result": n, **errors(*leaves, more)}
        for n, leaves in enumerate(
            zip(*map(jax.tree.leaves, (got, want, exact)), strict=True)
        )
    ]
    yield from rows
    off = [str(row["result"]) for row in rows if not row["right"]]
    if off:
        raise Off(f"off by more than is allowed: results {', '.join(off)}")


def _widened(x: jax.Array) -> jax.Array:
    return x.astype(F32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def errors(got, want, exact, more: float = 0.0) -> dict[str, Any]:
    """How far the kernel and XLA are off, and what is allowed; NaN never passes.

    `more` is allowed besides, of an op that states an error of its own.
    """
    if not jnp.issubdtype(got.dtype, jnp.floating):
        return {"right": bool((got == want).all()), "equal": True}
    eps = float(jnp.finfo(got.dtype).eps)
    got, want, exact = (np.asarray(x.astype(F32), "f8") for x in (got, want, exact))
    top = np.abs(exact).max(initial=0)
    off, its = (float(np.abs(x - exact).max(initial=0)) for x in (got, want))
    allowed = 4 * eps * float(top) + 2 * its + more
    right = bool(off <= allowed)  # False for NaN
    return {"right": right, "off": off, "XLA is off": its, "allowed": allowed}


# -- masks


def same_mask(draws: Callable[[str, bool], Any], small: bool) -> Rows:
    """What is dropped by kernel and XLA, which must be the same to the bit."""
    try:
        with kernels_here():
            got = jax.block_until_ready(jax.jit(partial(draws, "pallas", small))())
    except (ValueError, NotImplementedError) as error:
        raise NotHere(refusal(error)) from error
    want = jax.jit(partial(draws, "xla", small))()
    for n, pair in enumerate(zip(*map(jax.tree.leaves, (got, want)), strict=True)):
        apart, share = int((pair[0] != pair[1]).sum()), float(pair[1].mean())
        right = apart == 0 and 0.4 < share < 0.6
        yield {"result": n, "bits": pair[0].size, "apart": apart, "right": right}
        if not right:
            raise RuntimeError(f"result {n}: {apart} bits differ, {share:.0%} are set")


def of_attention(implementation: str, small: bool):
    """Unit vectors as values: an output, or a gradient of one, is a bit of the mask."""
    length, h = 128 if small else 512, 64
    q = jnp.zeros((2, length, 2, h), BF16)
    at = jnp.arange(length)[:, None] - h * (length // h - 1)  # the last keys
    unit = (at == jnp.arange(h)).astype(BF16)
    v = jnp.broadcast_to(unit[:, None], q.shape)
    attend = partial(
        ops.dot_product_attention,
        dropout_rate=0.5,
        dropout_rng=jax.random.key(3),
        implementation=implementation,
    )
    out, pull = jax.vjp(lambda v: attend(q, q, v), v)
    return out > 0, pull(v)[0] > 0


def of_residual(implementation: str, small: bool):
    """Ones on a stream of zeros: an element is zero where it is dropped."""
    x = jnp.ones((64, 128) if small else (1000, 1152), BF16)
    norm = partial(
        ops.dropout_add_layer_norm,
        rate=0.5,
        rng=jax.random.key(3),
        implementation=implementation,
    )
    return norm(x, jnp.zeros_like(x))[1] > 0  # of the sum


MASKS = {"attention": of_attention, "dropout_add_layer_norm": of_residual}
