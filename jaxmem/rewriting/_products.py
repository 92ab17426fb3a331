"""Products and convolutions with a weight that is cast or transposed for them.

jax keeps the cast, transposed copy for the backward pass. Here it is recomputed from
the weight, which is there anyway: for a cast or a transposition, and no product.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import ops
from jaxmem.rewriting._pattern import Pattern


def _dense(axes: int, x_dims: str, w_dims: str) -> Pattern:
    def lean(x, w):
        return ops.dense(x, w, axis=tuple(range(-axes, 0)), dtype=x.dtype)

    return Pattern(
        "dense",
        lambda x, w: jnp.tensordot(x, w, axes),
        lean,
        examples=(x_dims, w_dims),
        uncast=(1,),
    )


def _transposed(x, w):
    return lax.dot_general(x, w.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())))


def _tied_head(x, w):
    """`x @ w.T`, keeping w as it is."""
    with jax.named_scope("jaxmem.dense"):
        return jax.checkpoint(_transposed, prevent_cse=False)(x, w)


def dense_patterns() -> list[Pattern]:
    """Kernels of Flax's layers, and an embedding that is used as a head."""
    return [
        _dense(1, "*batch d", "d f"),
        _dense(1, "*batch d", "d n h"),
        _dense(2, "*batch n h", "n h d"),
        Pattern(
            "dense",
            lambda x, w: jnp.einsum("...d,fd->...f", x, w),
            _tied_head,
            examples=("*batch d", "f d"),
            uncast=(1,),
        ),
    ]


_CONV_PARAMS = (
    *("window_strides", "padding", "lhs_dilation", "rhs_dilation"),
    *("dimension_numbers", "feature_group_count", "batch_group_count"),
    *("precision", "preferred_element_type"),
)


def _plain_conv(channels_last: bool, x, w):
    space = "DHW"[5 - x.ndim :] if x.ndim <= 5 else ""
    x_dims = f"N{space}C" if channels_last else f"NC{space}"
    w_dims = f"{space}IO" if channels_last else f"OI{space}"
    channels = (x.shape[-1], w.shape[-2]) if channels_last else (x.shape[1], w.shape[1])
    return lax.conv_general_dilated(
        *(x, w, (1,) * len(space), "SAME"),
        dimension_numbers=(x_dims, w_dims, x_dims),
        feature_group_count=channels[0] // channels[1],
    )


def _lean_conv(x, w, **params: Any):
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def conv(x, w):
        return lax.conv_general_dilated(x, w.astype(x.dtype), **params)

    with jax.named_scope("jaxmem.conv"):
        return conv(x, w)


def conv_patterns() -> list[Pattern]:
    """Any convolution of channels last or first; its parameters stay."""
    layouts = {
        True: ("b *space i=6", "*kernel j=3 o=4"),
        False: ("b i=6 *space", "o=4 j=3 *kernel"),
    }
    return [
        Pattern(
            "conv",
            functools.partial(_plain_conv, channels_last),
            _lean_conv,
            examples=examples,
            uncast=(1,),
            params=_CONV_PARAMS,
        )
        for channels_last, examples in layouts.items()
    ]
