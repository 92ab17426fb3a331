"""cuDNN: its attention by every rule that it is taken for, beside XLA's in float32.

`implementation=None` has to take it, and has to be as near as XLA's own path. Besides,
two looks at what it is not taken for: dropout in a loop over layers, whose gradient
with respect to the values must be that of a linear function; and heads of sizes that
are padded here, as they are.
"""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks import kernel_cases
from benchmarks.device import attention_rules, right
from benchmarks.device.job import Job, NotHere, Rows
from jaxmem import ops
from jaxmem.ops.attention import cudnn

SDS = jax.ShapeDtypeStruct
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
MARK = "__cudnn$fmha"
AT_ONCE = 12
RULES = (
    *("even", "ragged", "causal", "window", "segments", "mask"),
    *("shared keys", "short", "lengths", "many blocks"),
)


@dataclass(frozen=True)
class Look:
    """Attention whose output and gradients are compared.

    Attributes:
      fn: from an implementation to the op, of q, k and v.
      args: types of q, k and v.
      taken: whether it is cuDNN's.
    """

    fn: Callable[[str | None], Callable]
    args: tuple
    taken: bool = True


def jobs() -> Iterator[Job]:
    how = {"seconds": 60, "value": 900}
    yield Job("cuDNN: right", right_of_all, **how)
    yield Job("cuDNN: dropout in a loop", dropout_in_a_loop, seconds=20, value=300)
    yield Job("cuDNN: heads as they are", odd_heads, seconds=40, value=200)


def looks() -> dict[str, Look]:
    found = {}
    for name in RULES:
        case = attention_rules.case(name, False, BF16)
        found[name] = Look(case.fn, case.args, name not in ("lengths, causal",))
    found["float16, causal"] = plain((2, 256, 4, 64), F16, is_causal=True)
    found["float32"] = plain((2, 256, 4, 64), F32, taken=False)
    for size in (32, 48, 80, 128):
        found[f"heads of {size}"] = plain((2, 384, 4, size), is_causal=True)
    found["odd length"] = plain((2, 333, 4, 64))
    found["long"] = plain((1, 4096, 4, 128), is_causal=True)
    lengths = jnp.asarray([0, 100, 256], jnp.int32)
    found["an example without keys"] = plain(
        (3, 256, 4, 64), key_value_seq_lengths=lengths
    )
    mask = jax.random.bernoulli(jax.random.key(5), 0.5, (3, 1, 256, 256))
    mask = mask.at[1, :, 7].set(False).at[2].set(False)
    found["rows without keys"] = plain((3, 256, 4, 64), mask=mask)
    found["rows without keys, causal"] = plain(
        (3, 256, 4, 64), mask=mask, is_causal=True
    )
    found["lengths, causal"] = plain(
        (3, 256, 4, 64), is_causal=True, key_value_seq_lengths=lengths
    )
    found["under vmap"] = Look(mapped, (SDS((3, 2, 256, 4, 64), BF16),) * 3)
    found["in a scan, recomputed"] = Look(layers, (SDS((2, 256, 4, 64), BF16),) * 3)
    return found


def plain(shape: tuple, dtype=BF16, taken: bool = True, **options) -> Look:
    fn = lambda how: partial(ops.dot_product_attention, implementation=how, **options)
    return Look(fn, (SDS(shape, dtype),) * 3, taken)


def mapped(how: str | None) -> Callable:
    return jax.vmap(partial(ops.dot_product_attention, implementation=how))


def layers(how: str | None) -> Callable:
    attend = partial(ops.dot_product_attention, is_causal=True, implementation=how)

    def run(q, k, v):
        layer = jax.checkpoint(lambda x, n: (x + n * attend(x, k, v), None))
        return jax.lax.scan(layer, q, jnp.arange(1.0, 4.0).astype(q.dtype))[0]

    return run


def right_of_all(small: bool) -> Rows:
    yield from compared(looks(), small)


def compared(looks: dict[str, Look], small: bool) -> Rows:
    """A row for each result of each look; an error after the last if one is off."""
    if jax.default_backend() != "gpu" and not small:
        raise NotHere("no GPU")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(partial(_compared, small), looks.items()))
    rows = [row for some in found for row in some]
    yield from rows
    off = [f"{row['look']}, {row['result']}" for row in rows if not row["right"]]
    if off:
        raise RuntimeError(f"off by more than is allowed: {'; '.join(off)}")


def _compared(small: bool, named: tuple[str, Look]) -> list[dict[str, Any]]:
    name, look = named
    if small and max(look.args[0].shape) > 1000:
        return []
    args = kernel_cases.filled((*look.args, look.args[0]), 97)
    wide = jax.tree.map(lambda x: x.astype(F32), args)
    run = jax.jit(partial(_gradients, look.fn(None)))
    compiled = run.lower(*args).compile()
    if small:
        return [{"look": name, "result": "compiled", "right": True}]
    names = ("output", "q", "k", "v")
    want = jax.jit(partial(_gradients, look.fn("xla")))
    with jax.default_matmul_precision("highest"):
        exact = want(*wide)
    results = zip(names, compiled(*args), want(*args), exact, strict=True)
    rows = [{"look": name, "result": n, **right.errors(*xs)} for n, *xs in results]
    calls = [line for line in compiled.as_text().splitlines() if MARK in line]
    row = {"look": name, "result": "taken as expected"}
    row |= {"right": bool(calls) == look.taken, "calls": [_sizes(c) for c in calls]}
    return [*rows, row]


def _sizes(call: str) -> str:
    """Types of the results of a call, its workspace among them."""
    return re.sub(r"{[^}]*}|/\*.*?\*/", "", call.split("custom-call(")[0])[-200:]


def _gradients(fn: Callable, q, k, v, g) -> tuple:
    out, pull = jax.vjp(fn, q, k, v)
    return out, *pull(g)


# -- what it is not taken for


def dropout_in_a_loop(small: bool) -> Rows:
    """sum(g * attention(v)) is linear in v: it equals v times its gradient."""
    if jax.default_backend() != "gpu":
        raise NotHere("no GPU")
    from jax._src.cudnn import fused_attention_stablehlo as fused

    x = kernel_cases.filled(SDS((4, 2, 256, 4, 64), BF16), 97)

    def total(v, scan: bool):
        def layer(_, qv):
            q, v = qv
            out = fused.dot_product_attention(q, q, v, scale=0.125, dropout_rate=0.5)
            return None, (out.astype(F32) * q.astype(F32)).sum()

        if scan:
            return jax.lax.scan(layer, None, (x, v))[1].sum()
        return sum(layer(None, (x[n], v[n]))[1] for n in range(len(x)))

    for scan in (False, True):
        value, grad = jax.jit(jax.value_and_grad(partial(total, scan=scan)))(x)
        by_gradient = (grad.astype(F32) * x.astype(F32)).sum()
        off = abs(float(value - by_gradient)) / abs(float(value))
        row = {"value": float(value), "gradient times values": float(by_gradient)}
        yield {"in a scan": scan, **row, "off": off, "alike": off < 0.02}


def odd_heads(small: bool) -> Rows:
    """Sizes that are padded here, without that."""
    with mock.patch.object(cudnn, "_padded", lambda x: x):
        cudnn._forward.cache_clear()
        cudnn._backward.cache_clear()
        found = {
            f"heads of {size}": plain((2, 384, 4, size), is_causal=True)
            for size in (8, 16, 32, 48, 72, 80, 96)
        }
        yield from compared(found, small)
