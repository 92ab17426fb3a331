"""Cross entropy of a linear layer's logits, of which only a block exists at a time.

A block is all tokens and some columns of the vocabulary. The forward pass runs over
them with an online log-sum-exp (Milakov and Gimelshein 2018); the backward pass
recomputes each block's logits: four products where the plain layer has three. Source:
Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (ICLR 2025).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.ops.common.blocks import tied
from jaxmem.ops.common.lean import wide_dtype
from pallas_kernels.dispatch import Implementation

# Small beside the gradient of x in float32 that is added up beside a block.
BLOCK_LOGITS_BYTES = 32 * 2**20
# Below this each block reads all of x for too few columns.
_LEAST_COLUMNS = 512


@dataclass(frozen=True)
class Head:
    """The static part. `vocab_axis` is 0 or 1; a block is `block` columns a shard."""

    vocab_axis: int
    softcap: float | None
    sums: bool  # whether the sum of all logits is wanted
    accumulator: Any
    precision: Any
    block: int
    shards: int
    implementation: Implementation | None = None
    kernel_block: int | None = None  # columns of a kernel's block, if asked for


class Rows(NamedTuple):
    """What a token's loss is made of, all [tokens] in float32 or wider."""

    top: Any  # the largest logit; no gradient is taken of it
    log_total: Any  # `top + log_total` is the log-sum-exp
    hit: Any  # the logit of the label, or 0 where this part of the vocabulary lacks it
    total: Any  # the sum of all logits


def block_columns(tokens: int, vocabulary: int, shards: int, wanted: int | None) -> int:
    """Columns of a block on each of `shards`: their float32 logits fit the budget."""
    columns = wanted
    if columns is None:
        fit = BLOCK_LOGITS_BYTES * shards // (4 * max(1, tokens))
        columns = max(fit - fit % _LEAST_COLUMNS, _LEAST_COLUMNS)
    return max(1, min(-(-columns // shards), vocabulary // shards))


def _apart(head: Head, array, axis: int):
    """The vocabulary's axis as (shards, columns): a slice takes from every shard."""
    shape = array.shape
    split = (head.shards, shape[axis] // head.shards)
    return array.reshape((*shape[:axis], *split, *shape[axis + 1 :]))


def _take(array, axis: int, start, size: int):
    """`size` columns from every shard, along one axis."""
    block = lax.dynamic_slice_in_dim(array, start, size, axis + 1)
    return lax.collapse(block, axis, axis + 2)


def _put(array, block, axis: int, start):
    """The reverse of `_take`."""
    shards = array.shape[axis]
    split = (shards, block.shape[axis] // shards)
    shape = (*block.shape[:axis], *split, *block.shape[axis + 1 :])
    block = block.astype(array.dtype).reshape(shape)
    return lax.dynamic_update_slice_in_dim(array, block, start, axis + 1)


def _over_blocks(head: Head, x, kernel, step: Callable, carry):
    """`step(carry, start, columns)` over all columns of a shard, the last shorter."""

    def body(carry, n):
        # Tied to x: what depends on the counter and the labels alone would be moved out
        # of a differentiated outer scan, and stacked.
        return step(carry, tied(n, x) * head.block, head.block), None

    size = kernel.shape[head.vocab_axis + 1]
    count, rest = divmod(size, head.block)
    if (count, rest) == (1, 0):
        return step(carry, jnp.int32(0), size)
    carry = lax.scan(body, carry, jnp.arange(count, dtype=jnp.int32))[0]
    return step(carry, jnp.int32(size - rest), rest) if rest else carry


def _slices(head: Head, x, kernel, bias, start, size: int):
    """A block of the kernel in x's dtype, of the bias, and its columns' numbers."""
    w = _take(kernel, head.vocab_axis, start, size).astype(x.dtype)
    b = None if bias is None else _take(bias, 0, start, size)
    shape = (head.shards, size)
    shard, lane = (lax.broadcasted_iota(jnp.int32, shape, a) for a in (0, 1))
    column = shard * kernel.shape[head.vocab_axis + 1] + lane + start
    return w, b, column.reshape(-1)


def _dot(head: Head, a, b, axes: tuple[int, int]) -> Any:
    """The product of two matrices over an axis of each."""
    return lax.dot_general(
        a,
        b,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=head.precision,
        preferred_element_type=wide_dtype(a.dtype),
    )


def _raw_logits(head: Head, x, w, b):
    """[tokens, columns] in float32 or wider."""
    logits = _dot(head, x, w, (1, 1 - head.vocab_axis))
    return logits if b is None else logits + b.astype(logits.dtype)[None]


def _capped(head: Head, raw):
    return raw if head.softcap is None else head.softcap * jnp.tanh(raw / head.softcap)


def flat(x, labels):
    """Tokens along one axis; kept are the arrays as they came, as others keep them."""
    return x.reshape(labels.size, x.shape[-1]), labels.reshape(labels.size)


def forward(head: Head, x, kernel, bias, labels) -> Rows:
    x, labels = flat(x, labels)
    parts = _apart(head, kernel, head.vocab_axis), _bias_apart(head, bias)

    def step(rows: Rows, start, size):
        w, b, column = _slices(head, x, *parts, start, size)
        logits = _capped(head, _raw_logits(head, x, w, b))
        top = jnp.maximum(rows.top, logits.max(1))
        block_sum = jnp.exp(logits - top[:, None]).sum(1)
        here = column[None] == labels[:, None]
        return Rows(
            top,
            rows.log_total * jnp.exp(rows.top - top) + block_sum,
            rows.hit + jnp.where(here, logits, 0.0).sum(1),
            rows.total + logits.sum(1) if head.sums else None,
        )

    dtype = wide_dtype(x.dtype)
    zero = _compat.vary(jnp.zeros(x.shape[0], dtype), _compat.varying_axes(x))
    # Not -inf, so that a column may be masked by a bias of -inf.
    rows = Rows(zero + jnp.finfo(dtype).min, zero, zero, zero if head.sums else None)
    rows = _over_blocks(head, x, parts[0], step, rows)
    # The floor is for a part of the vocabulary that is -inf alone.
    total = jnp.maximum(rows.log_total, jnp.finfo(dtype).tiny)
    return rows._replace(log_total=jnp.log(total))


def _bias_apart(head: Head, bias):
    return None if bias is None else _apart(head, bias, 0)


def _logits_gradient(head: Head, raw, rows: Rows, here, g: Rows):
    """The cotangent of a block of logits, from those of the rows."""
    at = lambda row: row[:, None]
    logits = _capped(head, raw)
    p = jnp.exp(logits - at(rows.top) - at(rows.log_total))
    d = p * at(g.log_total) + jnp.where(here, at(g.hit), 0.0)
    d = d + at(g.total) if head.sums else d
    return d if head.softcap is None else d * (1 - (logits / head.softcap) ** 2)


def in_units(g: Rows):
    """The cotangents over the largest, and that one: products are scaled afterwards."""
    # Where all tokens weigh the same, a label's gradient is near -1 then, and rounds
    # well, whatever their number; and small ones do not underflow in float16.
    unit = jnp.max(jnp.maximum(jnp.abs(g.hit), jnp.abs(g.log_total)), initial=0.0)
    unit = jnp.where(unit > 0, unit, 1.0)
    return Rows(*(None if t is None else t / unit for t in g)), unit


def backward(head: Head, wanted, saved: dict, g: Rows) -> dict:
    """A dict of the gradients named in `wanted`."""
    x, labels = flat(saved["x"], saved["labels"])
    rows = saved["rows"]
    g, unit = in_units(g)
    kernel = _apart(head, saved["kernel"], head.vocab_axis)
    bias = _bias_apart(head, saved["bias"])

    def step(grads, start, size):
        w, b, column = _slices(head, x, kernel, bias, start, size)
        here = column[None] == labels[:, None]
        with jax.named_scope(_compat.RECOMPUTED):
            raw = _raw_logits(head, x, w, b)
        d = _logits_gradient(head, raw, rows, here, g)
        new = {}
        if "bias" in wanted:
            new["bias"] = _put(grads["bias"], unit * d.sum(0), 0, start)
        d = d.astype(x.dtype)
        if "x" in wanted:
            # Not optimal: each block reads and writes all of it, where a kernel would
            # hold a tile on chip.
            dx = _dot(head, d, w, (1, head.vocab_axis))
            new["x"] = grads["x"] + dx.astype(grads["x"].dtype)
        if "kernel" in wanted:
            dw = _dot(head, *((x, d) if head.vocab_axis else (d, x)), (0, 0))
            # Over all tokens in one product and rounded once: no float32 copy of the
            # kernel's gradient exists, which blocks of tokens would need.
            new["kernel"] = _put(grads["kernel"], unit * dw, head.vocab_axis, start)
        return new

    like = {"x": x, "kernel": kernel, "bias": bias}
    # in one order in every process, or no compiled program would be found in a cache
    init = {k: jnp.zeros_like(like[k]) for k in sorted(wanted)}
    if "x" in wanted:
        init["x"] = init["x"].astype(head.accumulator)
    grads = _over_blocks(head, x, kernel, step, init)
    if "x" in wanted:
        grads["x"] = unit * grads["x"].astype(unit.dtype)
    return {
        k: v.reshape(saved[k].shape).astype(saved[k].dtype) for k, v in grads.items()
    }
