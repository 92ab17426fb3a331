"""A convolution that keeps no cast copy of its kernel."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Inexact, Num

from jaxmem._checks import check_array, check_int, check_numbers, wrong_value
from jaxmem.ops.codes.quantization import SaveLike, bits_or_none
from jaxmem.ops.codes.readers import read_from_codes
from jaxmem.ops.codes.stored import Rng, Stored
from jaxmem.ops.linear.dense import check_operands, compute_dtype

Sizes = int | Sequence[int]
Padding = str | int | Sequence[int | tuple[int, int]]


def conv(
    x: Num[Array, "..."] | Stored,
    kernel: Num[Array, "..."],
    bias: Num[Array, " features"] | None = None,
    *,
    strides: Sizes = 1,
    padding: Padding = "SAME",
    input_dilation: Sizes = 1,
    kernel_dilation: Sizes = 1,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    dimension_numbers: Any = None,
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    save: SaveLike | None = None,
    save_rng: Rng = None,
) -> Inexact[Array, "..."]:
    """Convolution over any number of dimensions, as `jax.lax.conv_general_dilated`.

    Args:
        x: the input: batch, spatial dimensions, channels, unless `dimension_numbers`
            say otherwise.
        kernel: spatial dimensions, input channels / `feature_group_count`, output
            channels.
        bias: one number for each output channel, or None.
        strides: between windows, one for each spatial dimension or one for all.
        padding: "SAME", "VALID", "SAME_LOWER", a number for all sides, or for each
            spatial dimension a number or a pair (low, high).
        input_dilation: as `lhs_dilation`; one for each spatial dimension or for all.
        kernel_dilation: as `rhs_dilation`.
        feature_group_count: groups of channels that do not see each other.
        batch_group_count: as for `jax.lax.conv_general_dilated`.
        dimension_numbers: as for `jax.lax.conv_general_dilated`; None: channels last.
        dtype: to compute in; None: the dtype that x, kernel and bias promote to (at
            least a floating one).
        precision: of the products, as for `jax.lax.conv_general_dilated`.
        preferred_element_type: of the sums, as for `jax.lax.conv_general_dilated`.
        save: bits a value or a `Quantization`, to keep codes of x, as in `dense`.
        save_rng: a key for stochastic rounding, as in `dense`.

    Returns:
        Batch, spatial dimensions, output channels, in `dtype` (or
        `preferred_element_type`).

    Raises:
        ValueError: ranks or channels that do not fit, a bias of another size, options
            for another number of spatial dimensions, a padding in words together with
            `input_dilation`, a dtype that is not floating or complex.

    Saves:
        x in `dtype`, where the kernel is trained; the kernel as it is given, an
        argument, where x is differentiated; for bias nothing. With `save` the codes
        instead of x.

    Source:
        As `dense`; what frozen kernels save: Bhatia and Dangel, "Lowering PyTorch's
        Memory Consumption for Selective Differentiation", arXiv 2404.12406, section 3.
    """
    check_operands("conv", x, kernel, precision, preferred_element_type, save_rng)
    groups = check_int("conv: feature_group_count", feature_group_count, 1)
    batch_groups = check_int("conv: batch_group_count", batch_group_count, 1)
    if x.ndim < 3 or kernel.ndim != x.ndim:
        raise ValueError(
            f"conv: x {x.shape} and kernel {kernel.shape} must have one rank, of at "
            "least 3"
        )
    numbers = _numbers(x, kernel, dimension_numbers)
    _check_shapes(x, kernel, bias, numbers, groups, batch_groups)
    count = x.ndim - 2
    options = (
        ("window_strides", _each("strides", strides, count)),
        ("padding", _padding(padding, count)),
        ("lhs_dilation", _each("input_dilation", input_dilation, count)),
        ("rhs_dilation", _each("kernel_dilation", kernel_dilation, count)),
        ("dimension_numbers", numbers),
        ("feature_group_count", groups),
        ("batch_group_count", batch_groups),
        ("precision", precision),
        ("preferred_element_type", preferred_element_type),
    )
    quantization = bits_or_none("conv", save)
    dtype = compute_dtype("conv", dtype, x, kernel, bias)
    with jax.named_scope("jaxmem.conv"):
        # Cast outside: kept in `dtype`, as plain JAX does, and not wider.
        convolution = _convolution(options)
        y = read_from_codes(
            convolution, x.astype(dtype), quantization, save_rng, kernel
        )
        return y if bias is None else y + _along(bias.astype(dtype), y, numbers)


def _channels_last(ndim: int, given: Any) -> Any:
    """Flax's layout, where none is given."""
    if given is not None:
        return given
    spatial = tuple(range(1, ndim - 1))
    sides = (0, ndim - 1, *spatial)
    kernel = (ndim - 1, ndim - 2, *range(ndim - 2))
    return jax.lax.ConvDimensionNumbers(sides, kernel, sides)


def _numbers(x, kernel, given: Any) -> Any:
    try:
        spec = _channels_last(x.ndim, given)
        return jax.lax.conv_dimension_numbers(x.shape, kernel.shape, spec)
    except (TypeError, ValueError) as error:
        allowed = f"as of jax.lax.conv_dimension_numbers, or None: {error}"
        raise wrong_value("conv: dimension_numbers", given, allowed) from None


def _check_shapes(x, kernel, bias, numbers, groups: int, batch_groups: int) -> None:
    for name, size in (("x", x.shape[numbers.lhs_spec[0]]), ("kernel", None)):
        size = kernel.shape[numbers.rhs_spec[0]] if size is None else size
        if size % batch_groups:
            raise ValueError(
                f"conv: batch_group_count={batch_groups} does not divide the {size} "
                f"{'examples' if name == 'x' else 'features'} of {name}"
            )
    channels, want = x.shape[numbers.lhs_spec[1]], kernel.shape[numbers.rhs_spec[1]]
    if channels != want * groups:
        raise ValueError(
            f"conv: x {x.shape} has {channels} channels, kernel {kernel.shape} asks "
            f"for {want} in each of feature_group_count={groups} groups"
        )
    features = (kernel.shape[numbers.rhs_spec[0]],)
    if bias is not None and check_array("conv: bias", bias).shape != features:
        raise ValueError(
            f"conv: bias has shape {bias.shape}, the kernel's features are {features}"
        )


def _each(name: str, given: Sizes, count: int) -> tuple[int, ...]:
    """One number for each spatial dimension."""
    allowed = f"an int of at least 1, or {count} of them, one a spatial dimension"
    sizes = check_numbers(f"conv: {name}", given, allowed)
    if not isinstance(given, Sequence):
        sizes *= count
    if len(sizes) != count or any(n < 1 for n in sizes):
        raise wrong_value(f"conv: {name}", given, allowed)
    return sizes


def _padding(given: Padding, count: int) -> str | tuple[tuple[int, int], ...]:
    """What lax takes, hashable."""
    allowed = (
        f'"SAME", "VALID", "SAME_LOWER", an int, or {count} ints or pairs (low, high), '
        "one for each spatial dimension"
    )
    if isinstance(given, str):
        if given.upper() not in ("SAME", "VALID", "SAME_LOWER"):
            raise wrong_value("conv: padding", given, allowed)
        return given
    sides = given if isinstance(given, Sequence) else (given,) * count
    pairs = [
        check_numbers(
            "conv: padding", s if isinstance(s, Sequence) else (s, s), allowed
        )
        for s in sides
    ]
    if len(pairs) != count or any(len(pair) != 2 for pair in pairs):
        raise wrong_value("conv: padding", given, allowed)
    return tuple((low, high) for low, high in pairs)


def _along(bias: Array, y: Array, numbers) -> Array:
    shape = [1] * y.ndim
    shape[numbers.out_spec[1]] = bias.size
    return jnp.broadcast_to(bias.reshape(shape), y.shape).astype(y.dtype)


@functools.cache
def _convolution(options: tuple[tuple[str, Any], ...]) -> Callable:
    """(x, kernel) -> convolution, keeping the kernel as it is given."""

    def convolution(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel.astype(x.dtype), **dict(options))

    # Linear in input and kernel: the gradient of the one needs the other, and no more.
    # The cast is recomputed, as in `dense`.
    return jax.checkpoint(convolution, prevent_cse=False)
