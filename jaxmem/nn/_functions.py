"""What Flax's modules are given to call: attention and convolution on our ops."""

import math
from typing import Any

import jax.numpy as jnp

from jaxmem import ops


def attend(query, key, value, bias, mask, *, dropout_rate, dropout_rng, **options):
    """Attention over `[batch..., length, heads, features]` arrays of one dtype."""
    batch = query.shape[:-3]
    out = ops.dot_product_attention(
        _fold(query),
        _fold(key),
        _fold(value),
        _fold_logits(bias, batch),
        None if mask is None else _fold_logits(jnp.asarray(mask, bool), batch),
        dropout_rate=max(dropout_rate, 0.0),
        # Flax gives a key all the same: nothing is made of it without dropout.
        dropout_rng=dropout_rng if dropout_rate > 0.0 else None,
        **options,
    )
    return out if len(batch) == 1 else out.reshape(batch + out.shape[1:])


def _fold(x):
    if x.ndim == 4:
        return x
    # The op takes exactly one batch axis; with at most one the reshape costs nothing.
    return x.reshape((math.prod(x.shape[:-3]), *x.shape[-3:]))


def _fold_logits(x, batch):
    """`x`, broadcastable to `[*batch, heads, queries, keys]`, with one batch axis."""
    if x is None or x.ndim == 4 == len(batch) + 3:
        return x
    x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
    if any(n != 1 for n in x.shape[:-3]):
        x = jnp.broadcast_to(x, batch + x.shape[-3:])
    return _fold(x)


def promote(inputs: Any, kernel: Any, bias: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """Input and bias in `dtype`; the kernel waits for its cast."""
    return inputs.astype(dtype), kernel, None if bias is None else bias.astype(dtype)


def conv_general_dilated(
    lhs: Any,
    rhs: Any,
    window_strides: Any,
    padding: Any,
    *,
    lhs_dilation: Any,
    rhs_dilation: Any,
    save: Any = None,
    save_rng: Any = None,
    **options: Any,
) -> Any:
    """`jax.lax.conv_general_dilated` in the dtype of `lhs`."""
    return ops.conv(
        lhs,
        rhs,
        strides=window_strides,
        padding=padding,
        input_dilation=lhs_dilation,
        kernel_dilation=rhs_dilation,
        dtype=lhs.dtype,
        save=save,
        save_rng=save_rng,
        **options,
    )
