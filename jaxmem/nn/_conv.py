"""The convolution inside Flax's modules: what linen and nnx share."""

from typing import Any

from jaxmem import ops


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
