"""BatchNorm that keeps its input and two numbers a feature.

Plain JAX keeps three float32 copies of the input's shape in training. With given
statistics the operation is linear in its input and keeps what a linear one does: the
input, and that only for the gradient of the scale.
"""

import functools

import jax
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from jaxmem.ops.common.lean import wide_dtype
from jaxmem.ops.norms.moments import (
    Axes,
    Norm,
    affine,
    along,
    check_mask,
    check_reduced,
    keep_input,
    make_batch_norm,
)


def batch_norm(
    x: Float[Array, "..."],
    scale: Float[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    *,
    mean: Float[Array, "..."] | None = None,
    var: Float[Array, "..."] | None = None,
    axis: Axes = -1,
    epsilon: float = 1e-5,
    use_fast_variance: bool = True,
    mask: Bool[Array, "..."] | None = None,
    dtype: DTypeLike | None = None,
    axis_name=None,
    axis_index_groups=None,
) -> Array | tuple[Array, Array, Array]:
    """Batch normalisation over all axes but `axis`.

    Values are those of `flax.linen.BatchNorm`: statistics and the affine step in
    float32 (or wider), rounded once to the output dtype. The running averages are
    the caller's: training returns the batch's mean and variance for them. Both can
    be differentiated.

    Args:
        x: the input, any shape.
        scale: one number for each element of the feature axes, or None for ones.
        bias: as scale, or None for zeros.
        mean: the running mean, shaped as scale, to normalise with in inference.
        var: the running variance; given together with `mean`.
        axis: the feature axis or axes, which are not reduced.
        epsilon: added to the variance.
        use_fast_variance: as in `layer_norm`, like the arguments after it.

    Returns:
        Without `mean` and `var`: (output, mean, variance), the statistics in float32
        and the shape of the feature axes. With them: the output alone.

    Raises:
        ValueError: one of `mean` and `var` without the other, an axis out of range
            or no axis left to reduce, a parameter, statistic or mask that does not
            fit x.
        TypeError: x is not of a real floating dtype.

    Saves:
        Training: x and 8 bytes a feature; bias alone trained: nothing. Inference: x
        where the scale is trained, else nothing.

    Source:
        Ioffe and Szegedy 2015, arXiv 1502.03167.
    """
    norm = make_batch_norm(
        *("batch_norm", x, axis, dict(scale=scale, bias=bias, mean=mean, var=var)),
        epsilon=epsilon,
        dtype=dtype,
        fast_variance=use_fast_variance,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
    )
    with jax.named_scope("jaxmem.batch_norm"):
        if mean is not None:
            return _inference(norm)(x, scale, bias, mean, var)
        check_reduced(norm, x.ndim)
        mask = check_mask("batch_norm", "mask", mask, x)
        # No barriers: they keep XLA from fusing the gradient of the activation behind
        # the norm with the norm's own. Convolutional nets on a GPU take longer with
        # them, and DenseNet more bytes; on a CPU alone they spare any.
        y, *stats = keep_input(norm, barriers=False)(x, scale, bias, mask)
        batch_mean, batch_var = (s.squeeze(norm.axes) for s in stats)
        return y, batch_mean, batch_var


@functools.cache
def _inference(norm: Norm):
    """(x, scale, bias, mean, var) -> y, keeping nothing but arguments."""

    def apply(x, scale, bias, mean, var):
        wide = jax.ShapeDtypeStruct(x.shape, wide_dtype(x.dtype))
        mean, var = (along(s, wide, norm.features) for s in (mean, var))
        return affine(norm, x, mean, var, scale, bias)

    return jax.checkpoint(apply)
