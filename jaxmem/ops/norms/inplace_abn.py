"""Batch norm and activation in one op that keeps its output alone.

The backward pass goes back through the activation, z = act^-1(y), and through the
affine step with the guard of `from_output.py`, for scales of either sign. (The original
takes |scale| and so changes a pretrained network: arXiv 1712.02616, section 3.)
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from jaxmem._bits import pack_bits, unpack_bits
from jaxmem._checks import check_bool, check_float, wrong_value
from jaxmem.ops.activations.gelu import ERF, TANH
from jaxmem.ops.activations.inverse import UnimodalFunction, invert, settled
from jaxmem.ops.activations.silu import SILU
from jaxmem.ops.codes.stored import is_nonzero
from jaxmem.ops.common.lean import reread, wide_dtype, widen
from jaxmem.ops.norms.from_output import guard, norm_tangent
from jaxmem.ops.norms.moments import (
    Axes,
    Norm,
    affine,
    along,
    check_mask,
    check_reduced,
    clipped,
    make_batch_norm,
    raw_moments,
)

ACTIVATIONS = ("identity", "leaky_relu", "elu", "silu", "swish", "gelu")


@dataclass(frozen=True)
class Invertible:
    """An activation, its derivative, and its inverse from the output and a mask."""

    value: Callable[[Array], Array]
    slope: Callable[[Array], Array]
    inverse: Callable[[Array, Array | None], Array]
    split: float | None = None  # the input at the minimum, where a side is needed


def _from_unimodal(unimodal: UnimodalFunction) -> Invertible:
    back = lambda y, right: invert(unimodal, y, right)
    return Invertible(settled(unimodal), unimodal.slope, back, unimodal.argmin)


@functools.cache
def _leaky_relu(slope: float) -> Invertible:
    return Invertible(
        lambda z: jnp.where(z >= 0, z, slope * z),
        lambda z: jnp.where(z >= 0, 1.0, slope),
        lambda y, _: jnp.where(y >= 0, y, y / slope),
    )


@functools.cache
def _elu(alpha: float) -> Invertible:
    def inverse(y, _):
        # Saturated to -alpha, y says no more than that the input lay far out.
        ratio = jnp.maximum(y / alpha, -1 + float(jnp.finfo(y.dtype).eps))
        return jnp.where(y > 0, y, jnp.log1p(jnp.minimum(ratio, 0.0)))

    return Invertible(
        lambda z: jax.nn.elu(z, alpha),
        lambda z: jnp.where(z > 0, 1.0, alpha * jnp.exp(jnp.minimum(z, 0.0))),
        inverse,
    )


IDENTITY = Invertible(lambda z: z, jnp.ones_like, lambda y, _: y)
SILUS = _from_unimodal(SILU)
GELUS = {True: _from_unimodal(TANH), False: _from_unimodal(ERF)}


def _activation(name: str, negative_slope, alpha, approximate) -> Invertible:
    if name == "leaky_relu":
        return _leaky_relu(_positive("negative_slope", negative_slope))
    if name == "elu":
        return _elu(_positive("alpha", alpha))
    if name in ("silu", "swish"):
        return SILUS
    if name == "gelu":
        return GELUS[check_bool("inplace_abn: approximate", approximate)]
    if name == "identity":
        return IDENTITY
    hint = ": relu has no inverse, take leaky_relu" if name == "relu" else ""
    allowed = f"one of {ACTIVATIONS}{hint}"
    raise wrong_value("inplace_abn: activation", name, allowed)


def _positive(name: str, value: float) -> float:
    return check_float(f"inplace_abn, which inverts: {name}", value, above=0)


def inplace_abn(
    x: Float[Array, "..."],
    scale: Float[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    *,
    mean: Float[Array, "..."] | None = None,
    var: Float[Array, "..."] | None = None,
    activation: str = "leaky_relu",
    negative_slope: float = 0.01,
    alpha: float = 1.0,
    approximate: bool = True,
    axis: Axes = -1,
    epsilon: float = 1e-5,
    use_fast_variance: bool = True,
    mask: Bool[Array, "..."] | None = None,
    dtype: DTypeLike | None = None,
    axis_name=None,
    axis_index_groups=None,
) -> Array | tuple[Array, Array, Array]:
    """An activation after batch normalisation over all axes but `axis`.

    Values are those of `batch_norm` and the activation in float32 (or wider), rounded
    once. Unlike those of `batch_norm`, the statistics have no derivative.

    Args:
        x: the input, any shape.
        scale: one number for each element of the feature axis, or None for ones. Any
            sign.
        bias: as scale, or None for zeros.
        mean: the running mean, shaped as scale, to normalise with in inference.
        var: the running variance; given together with `mean`.
        activation: "leaky_relu", "elu", "silu" ("swish"), "gelu" or "identity".
        negative_slope: of leaky_relu; positive.
        alpha: of elu; positive.
        approximate: the tanh form of gelu if true, else the erf form.
        axis: the feature axis, which is not reduced.
        epsilon: added to the variance.
        use_fast_variance: as in `layer_norm`, like the arguments after it.

    Returns:
        Without `mean` and `var`: (output, mean, variance), the statistics in float32
        and the shape of scale. With them: the output alone.

    Raises:
        ValueError: an activation without an inverse, a slope or alpha that is not
            positive, several feature axes, one of `mean` and `var` without the other,
            an axis out of range or no axis left to reduce, parameters or a mask that
            do not fit x.
        TypeError: x is not of a real floating dtype.

    Saves:
        The output, with silu and gelu a bit an element more. Where x moves, in training
        4 bytes a feature; where x (in training) or scale moves, the normalised input of
        max(1, D // 64) features of D with the smallest scales, where there are scale or
        bias.

    Limits:
        The normalised input is recovered from the rounded output. In bfloat16 it is off
        by about `2^-9 (|z| + |bias|) / |scale|`, with silu and gelu near their minimum
        by up to `0.1 / |scale|`; an output of elu at its limit -alpha (z below -5 in
        bfloat16, -16 in float32) counts as that z. More than max(1, D // 64) features
        with a scale of zero get no gradient of scale in those beyond. A next layer that
        changes or does not keep the output (a residual sum, a frozen kernel) makes it a
        tensor of its own: then `batch_norm` and an activation by its input or its bits
        keep no more.

    Source:
        Rota Bulo et al., CVPR 2018, arXiv 1712.02616, section 3; the bit: Tempo, arXiv
        2210.10246, section 3.1.
    """
    act = _activation(activation, negative_slope, alpha, approximate)
    norm = make_batch_norm(
        *("inplace_abn", x, axis, dict(scale=scale, bias=bias, mean=mean, var=var)),
        epsilon=epsilon,
        dtype=dtype,
        fast_variance=use_fast_variance,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
    )
    if len(norm.features) > 1:
        raise ValueError(f"inplace_abn: axis={axis!r}, one feature axis is needed")
    with jax.named_scope("jaxmem.inplace_abn"):
        if mean is not None and var is not None:
            like = jax.ShapeDtypeStruct(x.shape, wide_dtype(x.dtype))
            stats = tuple(along(s, like, norm.features) for s in (mean, var))
            return _keep_output(norm, act, False)(x, scale, bias, None, stats)
        check_reduced(norm, x.ndim)
        mask = check_mask("inplace_abn", "mask", mask, x)
        stats = raw_moments(norm, widen(jax.lax.stop_gradient(x)), mask)
        mean, var = cast(tuple[Array, Array], stats)
        y = _keep_output(norm, act, True)(x, scale, bias, mask, stats)
        return y, jnp.squeeze(mean, norm.axes), jnp.squeeze(clipped(var), norm.axes)


def _sides(act: Invertible, z: Array) -> Array | None:
    if act.split is None:
        return None
    return checkpoint_name(pack_bits(z >= act.split), "jaxmem_inplace_abn_side")


@functools.cache
def _keep_output(norm: Norm, act: Invertible, training: bool) -> Callable:
    """(x, scale, bias, mask, (mean, variance before clipping)) -> y."""
    wide_norm = replace(norm, dtype=jnp.dtype(jnp.float32))

    def before(x, scale, bias, stats):
        wider = replace(wide_norm, dtype=wide_dtype(x.dtype))
        return affine(wider, x, stats[0], clipped(stats[1]), scale, bias)

    def forward(x, scale, bias, stats):
        z = before(x, scale, bias, stats)
        y = act.value(z).astype(norm.dtype)
        return z, checkpoint_name(y, "jaxmem_inplace_abn_output")

    @jax.custom_jvp
    def apply(x, scale, bias, mask, stats):
        return forward(x, scale, bias, stats)[1]

    @functools.partial(apply.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        x, scale, bias, mask, stats = primals
        z, y = forward(x, scale, bias, stats)
        index, columns = guard(norm, x, stats[0], stats[1], scale, bias)
        dots = [t if is_nonzero(t) else None for t in tangents[:3]]
        linear = functools.partial(_tangent, norm, act, training)
        linear = jax.checkpoint(linear)
        kept = y, _sides(act, z), stats[1], index, columns
        return y, linear(kept, scale, bias, mask, dots)

    return apply


def _tangent(
    norm: Norm, act: Invertible, training: bool, kept, scale, bias, mask, dots
) -> Array:
    """The linear map of the tangents of x, scale and bias (None: zero)."""
    y, sides, raw, index, columns = kept
    side = None if sides is None else unpack_bits(sides, y.shape)
    z = act.inverse(reread(y), side)
    eps = float(jnp.finfo(y.dtype).eps)
    wider = replace(norm, dtype=z.dtype)
    residuals = z, raw, index, columns
    flow = norm_tangent(wider, residuals, scale, bias, mask, dots, eps, not training)
    return (act.slope(z) * flow).astype(norm.dtype)
