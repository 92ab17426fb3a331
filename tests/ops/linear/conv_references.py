"""Plain references of the convolution, with Flax's layout."""

import functools

import jax
import jax.numpy as jnp

from jaxmem import ops
from tests.references import Comparison, unary_args


def plain_conv(x, kernel, bias=None, *, padding="SAME", **options):
    """The formula as Flax computes it: kernel and bias cast to the input's dtype."""
    spatial = "HWD"[: x.ndim - 2]
    y = jax.lax.conv_general_dilated(
        x,
        kernel.astype(x.dtype),
        padding=padding,
        dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
        **{"window_strides": (1,) * (x.ndim - 2), **options},
    )
    if bias is None:
        return y
    return y + jnp.broadcast_to(bias.astype(x.dtype), y.shape)


def conv_args(groups, biased):
    def args(shape, dtype, rng):
        size = (3,) * (len(shape) - 2)
        kernel = rng.standard_normal((*size, shape[-1] // groups, 4))
        bias = rng.standard_normal(4)
        parameters = [jnp.asarray(p, jnp.float32) for p in (kernel, bias)]
        return (*unary_args(shape, dtype, rng), *parameters[: 1 + biased])

    return args


def lean_conv(x, *parameters, **options):
    return ops.conv(x, *parameters, dtype=x.dtype, **options)


def _comparison(name, shape, groups, biased, lean, plain):
    return Comparison(
        name,
        functools.partial(lean_conv, **lean),
        functools.partial(plain_conv, **plain),
        conv_args(groups, biased),
        (shape,),
        (0, 1, 2)[: 2 + biased],
        lambda args, wanted: 0,
    )


COMPARISONS = [
    _comparison(
        "conv with strides",
        (1, 5, 7, 6),
        1,
        False,
        dict(strides=(2, 1), padding=(1, (0, 2))),
        dict(window_strides=(2, 1), padding=((1, 1), (0, 2))),
    ),
    _comparison(
        "conv dilated in groups",
        (3, 13, 6),
        2,
        True,
        dict(input_dilation=2, kernel_dilation=(3,), feature_group_count=2, padding=2),
        dict(
            lhs_dilation=(2,),
            rhs_dilation=(3,),
            feature_group_count=2,
            padding=((2, 2),),
        ),
    ),
]
