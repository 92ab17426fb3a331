"""Attention on TPUs by JAX's splash kernels, which keep the logits on the chip.

Between the passes are the arrays of the other implementations, so that one pass may be
these kernels' and the other XLA's. They keep one number a row, the logarithm of the sum
of the exponentials: that stands for the row's maximum, and the logarithm beside it
is 0. They multiply the queries by the scale before the product, in the queries' dtype.

What they take is what means the same there as here, in arrays that a TPU does not pad.
The rest is computed by XLA.

Source:
  Dao, "FlashAttention-2" (2023); JAX's splash attention.
"""

import functools
import importlib
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ops.attention.block import Extras, Rules
from jaxmem.ops.attention.mapped import joins_batch
from pallas_kernels import simulated_platform

PLATFORM, NAME = "tpu", "JAX's splash attention"
PARTITIONED = False
_SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention"  # imported when it may run
_LANES = 128
_LARGEST = 512  # positions of a block, as MaxText has them
# The kernels' own lists of blocks look at every pair of positions, which takes a second
# for 8,192 positions; those of causal masks are made from smaller ones here.
_LONGEST_WINDOWED = 8192


class SplashForm(NamedTuple):
    """The static part of a call.

    Attributes:
      heads: of the queries, in all examples.
      queries, keys: lengths.
      window: keys that a query sees before and after itself, None: all. Causal
        attention sees none after itself.
    """

    heads: int
    queries: int
    keys: int
    window: tuple[int | None, int | None] | None


def form_of(rules: Rules, q: Any, k: Any) -> SplashForm:
    """The form; whether the kernels take it is for `refusal` to say."""
    left, right = rules.window or (None, None)
    right = 0 if rules.causal else right
    window = None if left is right is None else (left, right)
    return SplashForm(q.shape[0] * q.shape[2], q.shape[1], k.shape[1], window)


def refusal(rules: Rules, q: Any, k: Any, bias: Any, extras: Extras) -> str:
    """Why the kernels do not take this; "" where they do.

    Args:
      rules: of the attention.
      q, k: [b, t, n, h] and [b, s, kh, h], arrays or their types.
      bias: None, or what is added to the logits.
      extras: inputs without a gradient.
    """
    form, size = form_of(rules, q, k), q.shape[-1]
    if rules.rate:
        return "dropout: they have none"
    if q.dtype != jnp.bfloat16:
        return f"{q.dtype.name}: their products round to bfloat16"
    if size % _LANES:
        # each array would take the memory of the next multiple, gradients too
        return f"heads of {size}: {_LANES} must divide them"
    if bias is not None:
        return "a bias: they have none"
    if extras._replace(seed=None) != Extras():
        # A row that sees no key takes the mean of the values in the blocks that are
        # visited, and not of all.
        return "a mask, lengths or segments: a row may see no key"
    if form.queries % _LANES or form.keys % _LANES:
        return f"{form.queries} queries, {form.keys} keys: {_LANES} must divide both"
    if form.window is None:
        return ""
    if form.queries != form.keys:
        return f"{form.queries} queries and {form.keys} keys under a causal mask"
    if form.window != (None, 0) and form.queries > _LONGEST_WINDOWED:
        return f"a window over {form.queries} positions: at most {_LONGEST_WINDOWED}"
    return ""


def wins(rules: Rules, q: Any, k: Any, bias: Any, extras: Extras):
    """A predicate of a device that is a TPU: they run on all of them."""
    del rules, q, k, bias, extras
    return _runs_on_all


def _runs_on_all(device: Any) -> bool:
    return True


# -- the passes


def forward(rules: Rules, q, k, v, bias, extras: Extras) -> tuple:
    """(o, row maximum [b, n, t], logarithm of the row sum [b, n, t])."""
    del bias, extras  # none is taken
    o, total = _forward(rules)({"q": q, "k": k, "v": v})
    return o, total, jnp.zeros_like(total)


def backward(rules: Rules, wanted: frozenset[str], saved: dict, g) -> dict[str, Any]:
    """A dict of the gradients named in `wanted`, of q, k and v."""
    found = {name: saved[name] for name in "qkvo"} | {"g": g}
    found["total"] = saved["top"] + saved["log_total"]
    grads = _backward(rules)(found)
    return {name: grads[name] for name in sorted(wanted)}


@functools.cache
def _forward(rules: Rules):
    return joins_batch(functools.partial(_run_forward, rules))


@functools.cache
def _backward(rules: Rules):
    return joins_batch(functools.partial(_run_backward, rules))


def _run_forward(rules: Rules, arrays: dict) -> tuple:
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    form = form_of(rules, q, k)
    o, (total,) = _kernel(form)(_folded(_scaled(rules, q)), _folded(k), _folded(v))
    total = total.reshape(q.shape[0], q.shape[2], q.shape[1])
    return _unfolded(o, q), total


def _run_backward(rules: Rules, arrays: dict) -> dict[str, Any]:
    form = form_of(rules, arrays["q"], arrays["k"])
    scaled = arrays | {"q": _scaled(rules, arrays["q"])}
    found = {name: _folded(scaled[name]) for name in "qkvog"}
    found["total"] = arrays["total"].reshape(form.heads, form.queries)
    grads = _compat.splash_attention_grads(_kernel(form), **found)
    grads = {x: _unfolded(y, arrays[x]) for x, y in zip("qkv", grads, strict=True)}
    return grads | {"q": _scaled(rules, grads["q"])}


def _scaled(rules: Rules, q):
    return q * jnp.asarray(rules.scale, q.dtype)


def _folded(x):
    """[b, t, n, h] as [b n, t, h]: groups of heads stay those of one head of keys."""
    return jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], x.shape[3])


def _unfolded(x, like):
    """[b n, t, h] as [b, t, n, h], the shape of `like`."""
    b, t, n, h = like.shape
    return jnp.swapaxes(x.reshape(b, n, t, h), 1, 2)


# -- the kernels' lists of blocks


def _block(length: int) -> int:
    """The largest block up to `_LARGEST` that divides a length."""
    return math.gcd(length, _LARGEST)


def _kernel(form: SplashForm):
    """The kernel for [n, t, h], [kh, s, h], [kh, s, h]."""
    splash = importlib.import_module(f"{_SPLASH}.splash_attention_kernel")
    at = _block(form.queries), _block(form.keys)
    small, counted = at, form
    if form.window in (None, (None, 0)):
        # By the same mask of fewer positions, two to a block: which blocks are visited,
        # and which of them in part, is the same.
        small = (2, 2)
        queries, keys = 2 * form.queries // at[0], 2 * form.keys // at[1]
        counted = form._replace(queries=queries, keys=keys)
    made = splash.make_splash_mha(
        _mask(counted),
        block_sizes=_sizes(splash, *small),
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
        interpret=simulated_platform() == "tpu",
    )
    infos = made.fwd_mask_info, made.dq_mask_info, made.dkv_mask_info
    if infos[0].q_sequence is not None:
        positions = jnp.arange(form.queries, dtype=jnp.int32)
        infos = (info._replace(q_sequence=positions) for info in infos)
    how = made.kwargs | {"block_sizes": _sizes(splash, *at)}
    return splash.SplashAttentionKernel(*infos, **how)


def _mask(form: SplashForm):
    masks = importlib.import_module(f"{_SPLASH}.splash_attention_mask")
    shape = form.queries, form.keys
    if form.window is None:
        one = masks.FullMask(shape)
    elif form.window == (None, 0):
        one = masks.CausalMask(shape)
    else:
        one = masks.LocalMask(shape, form.window, 0)
    return masks.MultiHeadMask([one] * form.heads)


def _sizes(splash, queries: int, keys: int):
    """The same blocks in all three kernels."""
    names = ("block_q", "block_q_dkv", "block_q_dq")
    found = dict.fromkeys(names, queries)
    names = ("block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute")
    return splash.BlockSizes(**found, **dict.fromkeys((*names, "block_kv_dq"), keys))
