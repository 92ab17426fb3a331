"""cuDNN: its attention by every rule that it is taken for, beside XLA's in float32.

`implementation=None` has to take it, and has to be as near as XLA's own path. Besides,
heads of sizes that are padded here, as they are.
"""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.device import attention_rules, right
from benchmarks.device.job import Job, NotHere, Rows
from benchmarks.steps import kernels as kernel_cases
from jaxmem import ops
from jaxmem.ops.attention import cudnn

SDS = jax.ShapeDtypeStruct
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
MARK = "__cudnn$fmha"
AT_ONCE = 12
RULES = ("even", "ragged", "causal", "shared keys", "short", "lengths", "many blocks")


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
    yield Job("cuDNN: right", right_of_all, seconds=120, value=1800)
    yield Job("cuDNN: heads as they are", odd_heads, seconds=40, value=200)


def looks() -> dict[str, Look]:
    found = {}
    for name in RULES:
        case = attention_rules.case(name, False, BF16)
        found[name] = Look(case.fn, case.args)
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
    found["window behind"] = plain((2, 512, 4, 64), local_window_size=(100, 0))
    how = {"is_causal": True, "key_value_seq_lengths": lengths}
    found["lengths, causal"] = plain((3, 256, 4, 64), taken=False, **how)
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
    off = []
    for row in _rows(looks, small):
        yield row
        if not row["right"]:
            off.append(f"{row['look']}, {row['result']}")
    if off:
        raise RuntimeError(f"off by more than is allowed: {'; '.join(off)}")


def _rows(looks: dict[str, Look], small: bool) -> Rows:
    """As the looks end: whoever has to stop early keeps what was found."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = [pool.submit(_compared, small, item) for item in looks.items()]
        for one in as_completed(found):
            yield from one.result()


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
        exact = _untuned(want, wide)
    results = zip(names, compiled(*args), _untuned(want, args), exact, strict=True)
    rows = [{"look": name, "result": n, **right.errors(*xs)} for n, *xs in results]
    calls = [line for line in compiled.as_text().splitlines() if MARK in line]
    row = {"look": name, "result": "taken as expected"}
    row |= {"right": bool(calls) == look.taken, "calls": [_sizes(c) for c in calls]}
    return [*rows, row]


def _untuned(fn: Any, args: tuple) -> tuple:
    """`fn(*args)`, without the minutes in which XLA times its products."""
    return fn.lower(*args).compile({"xla_gpu_autotune_level": 0})(*args)


def _sizes(call: str) -> str:
    """Types of the results of a call, its workspace among them."""
    return re.sub(r"{[^}]*}|/\*.*?\*/", "", call.split("custom-call(")[0])[-200:]


def _gradients(fn: Callable, q, k, v, g) -> tuple:
    out, pull = jax.vjp(fn, q, k, v)
    return out, *pull(g)


# -- what it is not taken for


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
