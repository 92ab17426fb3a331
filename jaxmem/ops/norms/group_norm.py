"""GroupNorm that keeps its input and two numbers a group; the rest is recomputed.

Plain JAX keeps three float32 copies of the input's shape.
"""

import jax
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from jaxmem._checks import check_int
from jaxmem.ops.norms.moments import (
    Axes,
    canonical_axes,
    check_input,
    check_mask,
    keep_input,
    make_norm,
)


def group_norm(
    x: Float[Array, "*batch c"],
    scale: Float[Array, " c"] | None = None,
    bias: Float[Array, " c"] | None = None,
    *,
    num_groups: int,
    epsilon: float = 1e-6,
    reduction_axes: Axes | None = None,
    use_fast_variance: bool = True,
    mask: Bool[Array, "..."] | None = None,
    dtype: DTypeLike | None = None,
    axis_name=None,
    axis_index_groups=None,
) -> Float[Array, "*batch c"]:
    """Group normalisation: statistics over the positions and one group of channels.

    Values are those of `flax.linen.GroupNorm`: statistics and the affine step in
    float32 (or wider), rounded once to the output dtype.

    Args:
        x: the input; the last axis is the channels, the first the batch.
        scale: one number a channel, or None for ones.
        bias: one number a channel, or None for zeros.
        num_groups: into how many equal groups the channels are split.
        epsilon: added to the variance.
        reduction_axes: the axes of the statistics, the last one among them; None:
            all but the first.
        use_fast_variance: as in `layer_norm`, like the arguments after it.

    Returns:
        The normalised input, in x's shape and `dtype`.

    Raises:
        ValueError: groups that do not divide the channels, reduction axes without
            the last axis, a parameter or mask that does not fit x.
        TypeError: x is not of a real floating dtype.

    Saves:
        x and 8 bytes a group of an example; bias alone trained: nothing.

    Source:
        Wu and He 2018, arXiv 1803.08494.
    """
    check_input("group_norm", x)
    last = x.ndim - 1
    num_groups = check_int("num_groups", num_groups, 1)
    if x.shape[-1] % num_groups:
        raise ValueError(
            f"group_norm: num_groups={num_groups} does not divide {x.shape[-1]} "
            "channels"
        )
    axes = _reduction_axes(reduction_axes, x.ndim)
    norm = make_norm(
        *("group_norm", x, dict(scale=scale, bias=bias)),
        axes=axes,
        features=(last,),
        epsilon=epsilon,
        dtype=dtype,
        fast_variance=use_fast_variance,
        groups=num_groups,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
    )
    with jax.named_scope("jaxmem.group_norm"):
        mask = check_mask("group_norm", "mask", mask, x)
        return keep_input(norm)(x, scale, bias, mask)[0]


def _reduction_axes(given: Axes | None, ndim: int) -> tuple[int, ...]:
    axes = (*range(1, ndim - 1), ndim - 1)
    if given is not None:
        axes = canonical_axes(given, ndim, "reduction_axes")
    if axes[-1] != ndim - 1:
        raise ValueError(
            f"group_norm: reduction_axes={given!r} must include the last axis"
        )
    return axes
