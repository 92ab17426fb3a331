"""LayerNorm and RMSNorm that keep one copy of an activation instead of three.

Plain JAX keeps three float32 copies of the input's shape for either. Where the output
is also the residual stream (post-norm) inside a `lax.scan`, `save="output"` costs as
much as "input": the carry is stacked a second time.
"""

import functools
from typing import Any

import jax
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from jaxmem._checks import check_key, wrong_value
from jaxmem.ops.codes.quantization import SaveLike, as_quantization
from jaxmem.ops.codes.stored import Rng
from jaxmem.ops.norms import kernels as kernels
from jaxmem.ops.norms.from_codes import keep_codes
from jaxmem.ops.norms.from_output import marked_output
from jaxmem.ops.norms.moments import (
    Axes,
    Norm,
    canonical_axes,
    check_input,
    check_mask,
    keep_input,
    make_norm,
)
from pallas_kernels.dispatch import Implementation, considered


def layer_norm(
    x: Float[Array, "..."],
    scale: Float[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    *,
    axis: Axes = -1,
    feature_axis: Axes | None = None,
    epsilon: float = 1e-6,
    use_fast_variance: bool = True,
    mask: Bool[Array, "..."] | None = None,
    dtype: DTypeLike | None = None,
    axis_name=None,
    axis_index_groups=None,
    save: SaveLike = "input",
    save_rng: Rng = None,
    implementation: Implementation | None = None,
) -> Float[Array, "..."]:
    """Layer normalisation, `(x - mean) * rsqrt(var + epsilon) * scale + bias`.

    Values are those of `flax.linen.LayerNorm`: statistics and the affine step in
    float32 (or wider), rounded once to the output dtype.

    Args:
        x: the input, any shape.
        scale: one number for each element of the feature axes, or None for ones.
        bias: as scale, or None for zeros.
        axis: the axis or axes over which the statistics are taken.
        feature_axis: the axis or axes along which `scale` and `bias` run, in rising
            order; None: those of `axis`.
        epsilon: added to the variance.
        use_fast_variance: variance as E[x^2] - E[x]^2 in one pass, clipped at zero.
        mask: which elements count in the statistics, broadcastable to x.
        dtype: of the output; None: that of x.
        axis_name: a mapped axis (`shard_map`, `vmap`) the statistics also run over.
        axis_index_groups: groups of indices within `axis_name`.
        save: "input", or "output" where the next operation keeps the output anyway
            (a matmul with a trained kernel). "output" is not exact: see Limits.
            Bits a value (1 to 8) or a `Quantization` keep codes of the normalised
            input, off by at most half a step: about 0.02 in 8 bits.
        save_rng: a key for stochastic rounding of the codes, another each step; None:
            to the nearest.
        implementation: "xla"; "pallas" for the kernel of a TPU or GPU, for the last
            axis without a mask, in reverse mode alone, with the variance in two
            passes; None: the kernel where it was measured to be no slower.

    Returns:
        The normalised input, in x's shape and `dtype`.

    Raises:
        ValueError: an axis out of range, a parameter or mask that does not fit x,
            another word for `save`, or `save="output"` with several axes, other
            feature axes, or an axis name; or no kernel does what "pallas" asks for.
        TypeError: x is not of a real floating dtype.

    Saves:
        "input": x and 8 bytes a row; x alone trained or scale alone trained, the
        same; bias alone trained: nothing. The kernel: x.
        "output": the output, 4 bytes a row, and the normalised input of
        max(1, D // 64) channels with their int32 places; without 4 bytes a row where
        x is frozen, without the channels where there is neither scale nor bias;
        bias alone trained: nothing.

    Cost:
        "input" moves as many bytes as the plain formula, or fewer (TPU v5e, by cost
        analysis: 0.7 times in a scan). "output" copies the output once in the
        backward pass to put the guarded channels in: 0.9 times the plain formula in
        a scan, 1.6 times where the norm stands alone and both passes are one fusion.

    Limits:
        With `save="output"` the normalised input is recovered from the rounded
        output, to about `eps / 4 * (1 + |bias| / |scale|)` (eps: 2^-7 in bfloat16),
        except in the guarded channels, where it is kept; where more channels than
        those have zero scales the others' gradient of scale is zero. Do not use it
        where all scales start at zero. Second derivatives are of that accuracy too.

    Source:
        Ba et al. 2016, arXiv 1607.06450; keeping the output: Tempo, Andoorveedu et
        al., NeurIPS 2022, arXiv 2210.10246, section 3.2.
    """
    options = dict(axis_name=axis_name, axis_index_groups=axis_index_groups)
    options |= dict(epsilon=epsilon, dtype=dtype, fast_variance=use_fast_variance)
    norm = _norm("layer_norm", x, scale, bias, axis, feature_axis, **options)
    return _apply(norm, x, scale, bias, mask, save, save_rng, implementation)


def rms_norm(
    x: Float[Array, "..."],
    scale: Float[Array, "..."] | None = None,
    *,
    axis: Axes = -1,
    feature_axis: Axes | None = None,
    epsilon: float = 1e-6,
    mask: Bool[Array, "..."] | None = None,
    dtype: DTypeLike | None = None,
    axis_name=None,
    axis_index_groups=None,
    save: SaveLike = "input",
    save_rng: Rng = None,
    implementation: Implementation | None = None,
) -> Float[Array, "..."]:
    """Root mean square normalisation, `x * rsqrt(mean(x^2) + epsilon) * scale`.

    Values are those of `flax.linen.RMSNorm`: statistics and the scaling in float32
    (or wider), rounded once to the output dtype.

    Args:
        x: the input, any shape.
        scale: one number for each element of the feature axes, or None for ones.
        axis: the axis or axes over which the mean square is taken.
        feature_axis: as in `layer_norm`, for `scale`.
        epsilon: added to the mean square.
        mask: which elements count in the mean square, broadcastable to x.
        dtype: of the output; None: that of x.
        axis_name: as in `layer_norm`, like the arguments after it.

    Returns:
        The normalised input, in x's shape and `dtype`.

    Raises:
        ValueError: as `layer_norm`.
        TypeError: x is not of a real floating dtype.

    Saves:
        "input": x and 4 bytes a row, whether x, scale or both are trained. The kernel:
        x.
        "output": the output, 4 bytes a row, and the normalised input of
        max(1, D // 64) channels with their int32 places; without 4 bytes a row where
        x is frozen, without the channels where there is no scale.

    Cost:
        As `layer_norm`.

    Limits:
        With `save="output"` the normalised input is recovered from the rounded
        output, to about eps / 4 (eps: 2^-7 in bfloat16) whatever the scale, except
        where it is zero: max(1, D // 64) such channels are kept exactly, the others'
        gradient of scale is zero. Do not use it where all scales start at zero.

    Source:
        Zhang and Sennrich 2019, arXiv 1910.07467; keeping the output: Tempo,
        Andoorveedu et al., NeurIPS 2022, arXiv 2210.10246, section 3.2.
    """
    options = dict(axis_name=axis_name, axis_index_groups=axis_index_groups)
    options |= dict(epsilon=epsilon, dtype=dtype, centred=False)
    norm = _norm("rms_norm", x, scale, None, axis, feature_axis, **options)
    return _apply(norm, x, scale, None, mask, save, save_rng, implementation)


def _norm(op: str, x, scale, bias, axis, feature_axis, **options: Any) -> Norm:
    """The checked description of one call."""
    check_input(op, x)
    axes = canonical_axes(axis, x.ndim)
    features = axes
    if feature_axis is not None:
        features = canonical_axes(feature_axis, x.ndim, "feature_axis")
    given = dict(scale=scale, bias=bias)
    return make_norm(op, x, given, axes=axes, features=features, **options)


def _check_save(norm: Norm, save: str) -> None:
    if not isinstance(save, str) or save not in ("input", "output"):
        raise wrong_value(f"{norm.name}: save", save, '"input", "output" or bits')
    if save == "input":
        return
    if len(norm.axes) > 1 or norm.features != norm.axes:
        raise ValueError(
            f'{norm.name}: save="output" takes one axis for statistics and features, '
            f"not {norm.axes} and {norm.features}"
        )
    if norm.axis_name is not None:
        raise ValueError(f'{norm.name}: save="output" takes no axis_name')


def _plain(norm: Norm, mask, save, rng: Rng, x, scale, bias) -> Array:
    how = as_quantization(save)
    if how is not None and x.size:
        return keep_codes(norm, x, scale, bias, mask, how, rng)
    if save == "output":
        rest = scale, bias, mask
        given = tuple(one is not None for one in rest)
        return marked_output(norm, given)(x, *(one for one in rest if one is not None))
    return keep_input(norm)(x, scale, bias, mask)[0]


def _apply(norm: Norm, x, scale, bias, mask, save, rng: Rng, implementation) -> Array:
    if as_quantization(save) is None:
        _check_save(norm, save)
    if rng is not None:
        check_key("save_rng", rng)
    with jax.named_scope(f"jaxmem.{norm.name}"):
        mask = check_mask(norm.name, "mask", mask, x)
        plain = functools.partial(_plain, norm, mask, save, rng)
        if not considered(norm.name, implementation, x):
            return plain(x, scale, bias)
        reason = kernels.unsupported(norm, x.ndim, mask, save)
        if reason is not None:
            how = norm.name, implementation, reason
            return kernels.refused(*how, plain, x, scale, bias)
        call = kernels.AddNorm(norm.name, norm, save, implementation)
        return kernels.add_norm(call, x, scale, bias)[0]
