"""Dot product attention: what `jax.nn` has, and dropout, in memory linear in length.

This file checks the arguments.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxmem._checks import (
    check_array,
    check_bool,
    check_float,
    check_int,
    check_key,
    check_numbers,
    shown,
    wrong_value,
)
from jaxmem.ops.attention import blockwise
from jaxmem.ops.attention.block import Extras, Rules
from jaxmem.ops.attention.codes import head_codes
from jaxmem.ops.attention.derivative import attend
from jaxmem.ops.attention.kernels import AttentionCall
from jaxmem.ops.attention.libraries import LIBRARIES, Library, attend_by, check_plain
from jaxmem.ops.codes.quantization import SaveLike
from jaxmem.ops.codes.stored import remember
from jaxmem.ops.common.blocks import vary_alike
from jaxmem.ops.randomness.bits import seed_words
from jaxmem.ops.randomness.dropout import check_rate, need_rng
from pallas_kernels.dispatch import Implementation, check_implementation
from pallas_kernels.hashing import rounded_rate


def _four(x, name: str) -> Any:
    """`x` with leading axes of length 1, or None."""
    if x is None:
        return None
    x = jnp.asarray(check_array(name, x))
    if x.ndim > 4:
        raise wrong_value(name, x, "an array of at most 4 axes")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _check_qkv(query, key, value) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if query.ndim not in (3, 4) or not query.ndim == key.ndim == value.ndim:
        raise ValueError(f"query, key and value must be (B)TNH, (B)SKH: got {shapes}")
    if key.shape != value.shape:
        raise ValueError(f"key and value must have one shape: got {shapes}")
    if query.shape[:-3] != key.shape[:-3] or query.shape[-1] != key.shape[-1]:
        raise ValueError(f"batch and head dimension must agree: got {shapes}")
    if key.shape[-2] == 0 or query.shape[-2] % key.shape[-2]:
        raise ValueError(f"key heads must divide query heads: got {shapes}")
    if key.shape[-3] == 0:
        raise ValueError(f"there must be at least one key: got {shapes}")
    dtypes = {x.dtype for x in (query, key, value)}
    if len(dtypes) != 1 or not jnp.issubdtype(query.dtype, jnp.floating):
        raise ValueError(
            "query, key and value must have one floating dtype: got "
            f"{shown(query)}, {shown(key)}, {shown(value)}"
        )


def _against(logits: tuple[int, ...], name: str, given) -> Any:
    """With four axes; an error for what does not broadcast to the logits."""
    x = _four(given, name)
    if x is None:
        return None
    if any(n not in (1, m) for n, m in zip(x.shape, logits, strict=True)):
        allowed = f"a shape that broadcasts to BNTS = {logits}"
        raise wrong_value(name, given, allowed)
    if name == "mask" and x.dtype != jnp.bool_:
        raise wrong_value(name, given, "boolean: pass other numbers as bias")
    return x


def _lengths(x, batch: int, name: str):
    if x is None:
        return None
    x = jnp.asarray(check_array(name, x))
    if x.shape != (batch,) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise wrong_value(name, x, f"{batch} integers, one an example")
    return x.astype(jnp.int32)


def _window(size) -> tuple[int, int] | None:
    if size is None:
        return None
    allowed = "an int of at least 0, or two: (left, right)"
    sides = check_numbers("local_window_size", size, allowed)
    sides = sides if isinstance(size, Sequence) else sides * 2
    if len(sides) != 2 or min(sides) < 0:
        raise wrong_value("local_window_size", size, allowed)
    return sides[0], sides[1]


def _segments(ours, theirs, query, key):
    """Segment ids of queries and keys, int32 [b, t] and [b, s]; or None, None."""
    if ours is None and theirs is None:
        return None, None
    if ours is None or theirs is None:
        raise ValueError(
            f"query_segment_ids={shown(ours)}, key_value_segment_ids={shown(theirs)}: "
            "segment ids are needed of queries and of keys, or of neither"
        )
    named = ("query_segment_ids", ours, query), ("key_value_segment_ids", theirs, key)
    return tuple(_ids(name, x, of.shape[:-2]) for name, x, of in named)


def _ids(name: str, x, shape: tuple[int, ...]):
    x = jnp.asarray(check_array(name, x))
    if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer):
        raise wrong_value(name, x, f"integers {shape}")
    return x.astype(jnp.int32).reshape(-1, shape[-1])


def _check_options(block_size, scale, dropout_rng) -> tuple[int | None, float | None]:
    """Those that may be None."""
    if dropout_rng is not None:
        check_key("dropout_rng", dropout_rng)
    size = None if block_size is None else check_int("block_size", block_size, 1)
    return size, None if scale is None else check_float("scale", scale)


def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K H"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    query_segment_ids: Int[Array, "*B T"] | None = None,
    key_value_segment_ids: Int[Array, "*B S"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Key[Array, ""] | UInt32[Array, "..."] | None = None,
    broadcast_dropout: bool = False,
    deterministic: bool = False,
    implementation: Implementation | Library | None = None,
    block_size: int | None = None,
    save: SaveLike | None = None,
) -> Float[Array, "*B T N H"]:
    """softmax(query key' * scale + bias) value, as `jax.nn.dot_product_attention`.

    Logits, softmax and sums are float32 or wider. A row with no key to see takes the
    mean of all values, as in `jax.nn`. Queries beyond `query_seq_lengths` give zeros.

    Under a sharded `jit` XLA's blocks are laid out, and cuDNN's attention is divided,
    so that a sharded batch or sharded heads need no communication; this is known from
    the mesh of the arguments or from `jax.set_mesh`. Differentiable in reverse mode,
    also twice, then without the savings. Under `vmap` a block grows by the mapped axis:
    prefer the batch axis.

    Args:
      query: T queries for N heads of H, with or without a batch axis B.
      key: S keys for K heads; K divides N (grouped queries where it is less).
      value: as `key`.
      bias: added to the logits; broadcasts to BNTS (leading axes may be absent).
      mask: boolean, True where a query may see a key; broadcasts to BNTS.
      scale: of the logits; 1 / sqrt(H) if None.
      is_causal: query t sees keys 0..t.
      query_seq_lengths: how many queries of each sequence are real.
      key_value_seq_lengths: how many keys.
      query_segment_ids, key_value_segment_ids: a query sees the keys of its segment,
        as where sequences are packed into one row; both or neither.
      local_window_size: query t sees keys t - left .. t + right; an int is both.
      dropout_rate: in [0, 1], of the probabilities; the others are divided by
        `1 - dropout_rate`. Rounded to a multiple of 2**-15, neither to 0 nor to 1.
      dropout_rng: a key, typed or raw; needed with dropout.
      broadcast_dropout: one mask for the whole batch and all heads.
      deterministic: True switches dropout off.
      implementation: "xla"; "pallas" for the kernel of a TPU or GPU, which holds the
        logits on the chip; None to choose by the chip that is compiled for, on one
        device, inside `jax.shard_map` and, those of others, under `vmap`: cuDNN's
        (under a sharded `jit`, too) for 16 bits on an NVIDIA GPU from Ampere on, and
        JAX's splash attention on a TPU for bfloat16 and heads of 128, for what has
        neither dropout, a bias, a mask nor segments (`cudnn_rules.py` and `splash.py`
        have all reasons); the kernel where it was measured to be no slower: on Hopper
        for bfloat16; else XLA. It reads a `mask` as a bias of two bytes (a GPU's as
        bits where it differs among queries), sums the gradient of a bias on the chip,
        so that no array is larger than the bias, is differentiable once, and on several
        devices needs a `jax.shard_map`.
        Or the kernel of a library, for what has no dropout, codes, segments or blocks:
        "cudnn", as in `jax.nn`; "tokamax" (`pip install tokamax`). These choose
        by the device of the process, not by the platform that is compiled for.
      block_size: queries a block; None chooses such that a block's float32 logits
        stay below 64 MiB, and takes one block where all fit; for a kernel it is one
        that suits the chip.
      save: bits a value (1 to 8) or a `Quantization`, to keep query, key, value and
        the output as codes, one step for each position and head. The output is exact;
        gradients are those at the values of the codes, each off by at most half a
        step. Rounding is to the nearest: no key makes the mean of these exact, since
        the softmax lies between the two products.

    Returns:
      The attended values, shape and dtype of `query`.

    Raises:
      ValueError: shapes or dtypes that do not fit, a rate outside [0, 1], dropout
        without a key, "pallas" where no kernel does it, a library with what it has not.
      ImportError: "tokamax" where it is not installed.

    Saves:
      query, key, value, the output, 8 bytes for each query and head, and with dropout
      8 bytes. Where only `value` is differentiated: neither `value` nor the output.
      With `save` these four as codes: bits / 8 byte an element, and a step (2 bytes for
      bfloat16, else 4) for each position and head of up to 128.

    Costs 7/6 of the matmul flops of `jax.nn`'s, forward and backward, and by TPU's cost
    analysis 0.9 to 1.9 times the bytes accessed (1.3 to 1.8 times those of
    `flax.linen` with dropout, whose logits are bfloat16): logits are float32, and each
    block reads all keys and values.

    Source:
      Vaswani et al., "Attention Is All You Need" (2017), section 3.2; Rabe and Staats,
      "Self-attention Does Not Need O(n^2) Memory" (2021).

    Example::

        query = key = value = x.reshape(8, 4, 8, 64)  # [batch, tokens, heads, size]
        y = jaxmem.ops.dot_product_attention(query, key, value, is_causal=True)
    """
    query, key, value = (
        jnp.asarray(check_array(name, x))
        for name, x in (("query", query), ("key", key), ("value", value))
    )
    _check_qkv(query, key, value)
    check_implementation(implementation, *LIBRARIES)
    block_size, scale = _check_options(block_size, scale, dropout_rng)
    check_bool("is_causal", is_causal)
    check_bool("broadcast_dropout", broadcast_dropout)
    q, k, v = (_four(x, "query") for x in (query, key, value))
    logits = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    bias, mask = _against(logits, "bias", bias), _against(logits, "mask", mask)
    rate = check_rate(dropout_rate, "dropout_rate")
    rate = 0.0 if check_bool("deterministic", deterministic) else rate
    codes = head_codes(save)
    if rate == 1.0 or query.size == 0:
        return jnp.zeros_like(query)
    if implementation == "cudnn" or implementation == "tokamax":
        check_plain(
            implementation,
            dropout_rate=rate or None,
            query_segment_ids=query_segment_ids,
            key_value_segment_ids=key_value_segment_ids,
            block_size=block_size,
            save=save,
        )
        return attend_by(
            *(implementation, query, key, value, bias, mask),
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
        )
    if rate:
        need_rng(dropout_rng, rate, "dropout_rate", "dropout_rng")
    seed = seed_words(dropout_rng) if rate else None
    rules = Rules(
        1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
        is_causal,
        _window(local_window_size),
        rounded_rate(rate),
        broadcast_dropout,
    )
    q_len = _lengths(query_seq_lengths, q.shape[0], "query_seq_lengths")
    kv_len = _lengths(key_value_seq_lengths, q.shape[0], "key_value_seq_lengths")
    segments = _segments(query_segment_ids, key_value_segment_ids, query, key)
    arrays = q, k, v, bias, mask, q_len, kv_len, seed, *segments
    how = implementation, block_size, codes
    o, coded = _attend(query.shape, rules, how, *arrays)
    if coded is not None and query.ndim == 4:
        remember(o, coded.codes)
    return o


@jax.named_scope("jaxmem.dot_product_attention")
def _attend(shape: tuple[int, ...], rules: Rules, how: tuple, *arrays):
    implementation, block_size, codes = how
    q, k, v, bias, *extras = vary_alike(*arrays)
    blocks = blockwise.make_blocks(rules, q, k, block_size)
    call = AttentionCall(blocks, implementation, block_size, codes)
    o, coded = attend(call, q, k, v, bias, Extras(*extras))  # pyright: ignore[reportGeneralTypeIssues]
    return o.reshape(shape), coded
