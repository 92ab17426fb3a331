"""Attention by cuDNN's kernels, which keep the logits on the chip.

Between the passes are the arrays of the other implementations, so that one pass may be
cuDNN's and the other XLA's. It keeps one number a row, the logarithm of the sum of the
exponentials: that stands for the row's maximum, and the logarithm beside it is 0.

A row that sees no key takes the mean of all values. cuDNN makes nothing of the kind,
so queries of such rows are zeros there: their logits are all alike.

Source:
  Dao, "FlashAttention-2" (2023); NVIDIA's cuDNN, through the operations of JAX.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ops.attention import block
from jaxmem.ops.attention.block import MASKED, Extras, Rules
from jaxmem.ops.attention.cudnn_rules import HEADS, CudnnForm, form_of, suits
from jaxmem.ops.attention.cudnn_rules import refusal as refusal
from jaxmem.ops.attention.mapped import joins_batch
from jaxmem.ops.attention.partitioned import in_parts
from pallas_kernels.attention import all_of
from pallas_kernels.lowering import warn_once
from pallas_kernels.partials import partial

PLATFORM, NAME = "cuda", "cuDNN's attention"
PARTITIONED = True  # passes take `sharded`


def wins(rules: Rules, q: Any, k: Any, bias: Any, extras: Extras):
    """A predicate of a GPU: whether its cuDNN does what `refusal` has let through."""
    del q, bias
    return partial(_wins, form_of(rules, extras), k.shape[1])


def _wins(form: CudnnForm, keys: int, device: Any) -> bool:
    """Whether the device's cuDNN does it; a process that has a GPU and none is told."""
    version, found = None, True
    if _compat.runs_here(device):
        version = _compat.cudnn_version()
        found = version is not None
    if not found:
        warn_once("attention: no cuDNN is installed; XLA computes it in blocks")
    return found and suits(form, keys, device, version)


# -- the passes


def forward(
    rules: Rules, q, k, v, bias, extras: Extras, sharded: bool = False
) -> tuple:
    """(o, row maximum [b, n, t], logarithm of the row sum [b, n, t]).

    `sharded`: under a `jit` over several devices.
    """
    del bias  # none is taken
    form, length = form_of(rules, extras), k.shape[1]
    live = _seeing(form, q, extras)
    zero = jnp.zeros((), q.dtype)
    asked = q if live is None else jnp.where(block.to_times_first(live), q, zero)
    arrays = {"q": _padded(asked), "k": _padded(k), "v": _padded(v)}
    found = {**arrays, "kv_len": _lengths(form, extras, length)}
    o, total = _forward(form, rules.scale, sharded)(found)
    o = _of_queries(extras, o[..., : q.shape[-1]])
    top, log_total = total, jnp.zeros_like(total)
    if live is not None:
        top = jnp.where(live, total, MASKED)
        log_total = jnp.where(live, log_total, jnp.log(float(length)))
    return o, top, log_total


def backward(
    rules: Rules, wanted: frozenset[str], saved: dict, g, sharded: bool = False
) -> dict[str, Any]:
    """A dict of the gradients named in `wanted`, of q, k and v; `sharded`: as above."""
    extras = Extras(*(saved[name] for name in Extras._fields))
    q, k = saved["q"], saved["k"]
    form, length = form_of(rules, extras), k.shape[1]
    live = _seeing(form, q, extras)
    zero, total = jnp.zeros((), q.dtype), saved["top"] + saved["log_total"]
    asked, g = q, _of_queries(extras, g)
    if live is not None:
        asked = jnp.where(block.to_times_first(live), q, zero)
        # queries are zeros there, and so are all logits
        total = jnp.where(live, total, jnp.log(float(length)))
    arrays = {"q": asked, "k": k, "v": saved["v"], "o": saved["o"], "g": g}
    found: dict[str, Any] = {name: _padded(x) for name, x in arrays.items()}
    found |= {"total": total, "kv_len": _lengths(form, extras, length)}
    grads = _backward(form, rules.scale, sharded)(found)
    grads = {name: x[..., : q.shape[-1]] for name, x in grads.items()}
    if live is not None:
        grads["q"] = jnp.where(block.to_times_first(live), grads["q"], zero)
    return {name: grads[name] for name in sorted(wanted)}


def _seeing(form: CudnnForm, q, extras: Extras):
    """Whether a row sees a key, [b, 1, t|1]; None where all do."""
    live = []
    if extras.q_len is not None:
        live.append(block.inside(jnp.arange(q.shape[1]), extras.q_len)[:, None])
    if form.padded:
        live.append((extras.kv_len > 0)[:, None, None])
    return all_of(live)


def _of_queries(extras: Extras, x):
    """`x` [b, t, n, h] with zeros for the queries beyond their sequence."""
    if extras.q_len is None:
        return x
    inside = block.inside(jnp.arange(x.shape[1]), extras.q_len)
    return jnp.where(inside[..., None, None], x, jnp.zeros((), x.dtype))


def _lengths(form: CudnnForm, extras: Extras, length: int):
    """Keys of each example, all of them where there are none; None without lengths."""
    if not form.padded:
        return None
    return jnp.where(extras.kv_len > 0, jnp.minimum(extras.kv_len, length), length)


def _padded(x):
    """Heads of a size that the kernels have."""
    size = next(size for size in HEADS if size >= x.shape[-1])
    return jnp.pad(x, ((0, 0),) * 3 + ((0, size - x.shape[-1]),))


# -- the operations, with mapped axes as more examples


@functools.cache
def _forward(form: CudnnForm, scale: float, sharded: bool):
    run = functools.partial(_compat.cudnn_attention, form, scale)
    return _mapped(run, ("q", "total"), sharded)


@functools.cache
def _backward(form: CudnnForm, scale: float, sharded: bool):
    run = functools.partial(_compat.cudnn_attention_grads, form, scale)
    return _mapped(run, ("k", "q", "v"), sharded)


def _mapped(run: Callable, results: tuple[str, ...], sharded: bool):
    run = in_parts(run, results) if sharded else run
    return joins_batch(run, within=sharded)
