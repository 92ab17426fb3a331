"""The records of products and convolutions, for weights cast or transposed for them.

jax keeps the cast, transposed copy for the backward pass. Here it is recomputed from
the weight, which is there anyway: for a cast or a transposition, and no product.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.ops.linear.conv import conv
from jaxmem.ops.linear.dense import dense
from jaxmem.ops.record import Formula, Layers, OpRecord


def _dense(axes: int, x_dims: str, w_dims: str) -> Formula:
    def lean(x, w):
        return dense(x, w, axis=tuple(range(-axes, 0)), dtype=x.dtype)

    return Formula(
        lambda x, w: jnp.tensordot(x, w, axes),
        lean=lean,
        examples=(x_dims, w_dims),
        uncast=(1,),
    )


def _transposed(x, w):
    return lax.dot_general(x, w.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())))


def _tied_head(x, w):
    """`x @ w.T`, keeping w as it is."""
    with jax.named_scope("jaxmem.dense"):
        return jax.checkpoint(_transposed, prevent_cse=False)(x, w)


DENSE = OpRecord(
    dense,
    (
        _dense(1, "*batch d", "d f"),
        _dense(1, "*batch d", "d n h"),
        _dense(2, "*batch n h", "n h d"),
        # an embedding that is used as a head
        Formula(
            lambda x, w: jnp.einsum("...d,fd->...f", x, w),
            lean=_tied_head,
            examples=("*batch d", "f d"),
            uncast=(1,),
        ),
    ),
    layers=Layers(
        linen=("Dense", "DenseGeneral"), nnx=("Linear", "LinearGeneral"), bits=True
    ),
)


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
    def convolution(x, w):
        return lax.conv_general_dilated(x, w.astype(x.dtype), **params)

    with jax.named_scope("jaxmem.conv"):
        return convolution(x, w)


_LAYOUTS = {
    True: ("b *space i=6", "*kernel j=3 o=4"),
    False: ("b i=6 *space", "o=4 j=3 *kernel"),
}
CONV = OpRecord(
    conv,
    # Any convolution of channels last or first; its parameters stay.
    tuple(
        Formula(
            functools.partial(_plain_conv, channels_last),
            lean=_lean_conv,
            examples=examples,
            uncast=(1,),
            params=_CONV_PARAMS,
        )
        for channels_last, examples in _LAYOUTS.items()
    ),
    # Both classes run one and the same `__call__`.
    layers=Layers(linen=("Conv", "ConvLocal"), nnx=("Conv",), bits=True),
)
