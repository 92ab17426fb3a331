"""Rates: what a chip reaches in single operations, by the profiler's times.

Products by shape and dtype, streams by size, what waits for arithmetic, reductions,
transpositions, rows that are gathered and added, copies to the host, launches.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.device import machine, on_device, seconds, traces
from benchmarks.device.job import Job, Rows
from benchmarks.device.timing import in_turn
from benchmarks.steps.kernels import filled
from jaxmem.chips import rates_of
from jaxmem.memory.buffers import parse_hlo
from jaxmem.memory.time.schedule import timed, total

SDS = jax.ShapeDtypeStruct
BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
CALLS = 5

# Batch, rows, sum, columns.
PRODUCTS = (
    (1, 8192, 8192, 8192),
    (1, 4096, 1024, 4096),
    (1, 4096, 4096, 1024),
    (1, 4096, 1024, 1024),
    (1, 1024, 4096, 1024),
    (1, 1024, 4096, 4096),
    (1, 4096, 1024, 50304),
    (1, 512, 1024, 1024),
    (1, 128, 4096, 4096),
    (128, 512, 64, 512),
    (128, 512, 512, 64),
    (64, 1024, 64, 1024),
    (64, 1024, 1024, 64),
    (64, 2048, 64, 2048),
    (256, 256, 64, 256),
    (16, 512, 1024, 512),
)


@dataclass(frozen=True)
class One:
    """An operation at a size."""

    fn: Callable[..., Any]
    args: tuple


def jobs() -> Iterator[Job]:
    yield Job("rates: operations", operations, seconds=120, value=1900)


def cases(small: bool) -> dict[str, One]:
    by = 64 if small else 1
    found: dict[str, One] = {}
    for dtype in (BF16, F32):
        for sizes in PRODUCTS:
            b, m, k, n = (max(1, x // by) for x in sizes)
            args = SDS((b, m, k), dtype), SDS((b, k, n), dtype)
            found[f"product {sizes} {jnp.dtype(dtype).name}"] = One(jnp.matmul, args)
    for power in (12, 16, 20, 22, 23, 24, 26, 28):
        x = SDS((2**power // by,), F32)
        found[f"x + 1, 2^{power} floats"] = One(lambda x: x + 1, (x,))
    found |= _elementwise(by) | _rows(by) | _layouts(by) | _loops(by)
    return found if small else found | _attention()


def _elementwise(by: int) -> dict[str, One]:
    wide, narrow = (SDS((2**26 // by,), dtype) for dtype in (F32, BF16))
    fns = {
        "exp": jnp.exp,
        "tanh": jnp.tanh,
        "gelu, erf": lambda x: jax.nn.gelu(x, approximate=False),
        "gelu, tanh": jax.nn.gelu,
        "rsqrt": jax.lax.rsqrt,
        "sin": jnp.sin,
        "x / (x + 2)": lambda x: x / (x + 2),
        "20 products and sums": lambda x: sum(x**n * n for n in range(2, 12)),
    }
    found = {
        f"{name}, 2^26 {jnp.dtype(x.dtype).name}": One(fn, (x,))
        for name, fn in fns.items()
        for x in (wide, narrow)
    }
    bits = lambda seed: jax.random.bits(jax.random.wrap_key_data(seed), (2**26 // by,))
    keep = lambda seed, x: jnp.where(
        jax.random.bernoulli(jax.random.wrap_key_data(seed), 0.9, x.shape), x, 0
    )
    seed = SDS((2,), jnp.uint32)
    found["threefry, 2^26"] = One(bits, (seed,))
    found["dropout, 2^26 bfloat16"] = One(keep, (seed, narrow))
    return found


def _rows(by: int) -> dict[str, One]:
    found = {}
    for rows, width in ((8192, 1024), (8192, 4096), (65536, 512), (4096, 50304)):
        for dtype in (F32, BF16):
            x = SDS((rows // by, width), dtype)
            what = f"{rows} x {width} {jnp.dtype(dtype).name}"
            found[f"softmax, {what}"] = One(jax.nn.softmax, (x,))
            found[f"sum of rows, {what}"] = One(lambda x: x.sum(-1, dtype=F32), (x,))
            found[f"sum of columns, {what}"] = One(lambda x: x.sum(0, dtype=F32), (x,))
    table, ids = SDS((50304 // by, 1024), F32), SDS((8192 // by,), I32)
    x = SDS((8192 // by, 1024), F32)
    found["rows of a table"] = One(
        lambda t, i: jnp.take(t, i, 0, mode="clip"), (table, ids)
    )
    found["rows added to a table"] = One(
        lambda t, i, x: t.at[i].add(x), (table, ids, x)
    )
    found["cumsum, 8192 x 1024"] = One(lambda x: jnp.cumsum(x, -1), (x,))
    found["sort, 8192 x 1024"] = One(lambda x: jnp.sort(x, -1), (x,))
    found["top 8, 8192 x 1024"] = One(lambda x: jax.lax.top_k(x, 8), (x,))
    return found


def _layouts(by: int) -> dict[str, One]:
    x = SDS((8, 4096 // by, 16, 64), BF16)
    square, image = SDS((8192 // by, 8192), F32), SDS((32, 56, 56, 64), BF16)
    kernel = SDS((3, 3, 64, 64), BF16)
    conv = lambda x, w: jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return {
        "heads first, bfloat16": One(lambda x: x.transpose(0, 2, 1, 3) + 1, (x,)),
        "transposition, 8192": One(lambda x: x.T + 1, (square,)),
        "concatenation": One(lambda x: jnp.concatenate([x, x]), (square,)),
        "convolution 3 x 3": One(conv, (image, kernel)),
        "its gradients": One(
            jax.grad(lambda x, w: conv(x, w).astype(F32).sum(), (0, 1)), (image, kernel)
        ),
    }


def _loops(by: int) -> dict[str, One]:
    """Small kernels, in a loop and one after another; rows written in a loop."""
    x, stack = SDS((4096,), F32), SDS((64, 2**20 // by), F32)

    def chain(x):
        for _ in range(64):
            x = jax.lax.optimization_barrier(x * 1.01)
        return x

    scan = lambda x: jax.lax.fori_loop(0, 256, lambda _, x: x * 1.01, x)
    write = lambda s: jax.lax.scan(lambda c, x: (c, x * 2), 0.0, s)[1]
    two = lambda x: jax.lax.fori_loop(0, 256, lambda _, x: jnp.sort(x[::-1]) * 1.01, x)
    return {
        "64 kernels in a row": One(chain, (x,)),
        "256 kernels in a loop": One(scan, (x,)),
        "256 times several kernels in a loop": One(two, (x,)),
        "rows of 4 MiB written in a loop": One(write, (stack,)),
    }


def _attention() -> dict[str, One]:
    """cuDNN's, forward and with its gradients."""
    found = {}
    shapes = (
        (8, 512, 16, 64),
        (4, 1024, 16, 64),
        (2, 2048, 32, 64),
        (1, 8192, 16, 128),
    )
    for shape in shapes:
        q = SDS(shape, BF16)
        for causal in (False, True):
            attend = lambda q, k, v, causal=causal: jax.nn.dot_product_attention(
                q, k, v, is_causal=causal, implementation="cudnn"
            )
            loss = lambda q, k, v, attend=attend: attend(q, k, v).astype(F32).sum()
            what = f"cuDNN's attention, {shape}{', causal' * causal}"
            found[what] = One(attend, (q, q, q))
            found[f"{what}, gradients"] = One(jax.grad(loss, (0, 1, 2)), (q, q, q))
    return found


def operations(small: bool) -> Rows:
    yield from measured(cases(small), small)


def measured(cases: dict[str, One], small: bool) -> Rows:
    """A row for each: milliseconds of a call and of its kernels, and the prediction."""
    with ThreadPoolExecutor(seconds.AT_ONCE) as pool:
        made = dict(zip(cases, pool.map(_compiled, cases.values()), strict=True))
    rates = rates_of(machine.target())
    for name, compiled in made.items():
        if isinstance(compiled, Exception):
            yield {
                "operation": name,
                "said": f"{type(compiled).__name__}: {compiled}"[:200],
            }
            continue
        call = on_device.Step(compiled, filled(cases[name].args, 97), 0)
        row = {
            "operation": name,
            **in_turn({name: call}, 2 if small else CALLS, 1)[name],
        }
        found = traces.kernels(call, 1 if small else CALLS)
        row["kernels ms"] = 1e3 * sum(one.seconds for one in found)
        row["kernels"] = {
            one.op or one.name: round(1e6 * one.seconds, 2)
            for one in sorted(found, key=lambda one: -one.seconds)[:8]
        }
        if rates is not None:
            said = timed(parse_hlo(compiled.as_text()), rates).kernels
            row["predicted ms"] = 1e3 * total(said)
            row["flops"] = sum(one.times * one.flops for one in said)
            row["bytes"] = sum(one.times * one.bytes for one in said)
        seconds.left(f"operation {name}", compiled.as_text(), found)
        yield row


def _compiled(one: One) -> Any:
    """The program, or why there is none: the others are measured all the same."""
    try:
        return jax.jit(one.fn).lower(*one.args).compile()
    except Exception as error:
        return error
