"""LayerNorm and RMSNorm that keep their normalised input in a few bits."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxmem.ops.codes.quantization import Quantization
from jaxmem.ops.codes.stored import Rng, is_nonzero, new_codes, remember, seed_of
from jaxmem.ops.common.lean import wide_dtype, widen
from jaxmem.ops.norms.from_output import input_tangent
from jaxmem.ops.norms.moments import Norm, affine, along, clipped, raw_moments


def _tangent(norm: Norm, like: Any, kept, raw, scale, mask, dots) -> Array:
    """The linear map of the tangents of x, scale and bias (None: zero)."""
    x_dot, scale_dot, bias_dot = dots
    xhat = kept.recall(like)
    at = lambda p: along(p, xhat, norm.features)
    parts = []
    if x_dot is not None:
        flow = input_tangent(norm, xhat, raw, mask, x_dot.astype(xhat.dtype))
        parts.append(flow if scale is None else at(scale) * flow)
    if scale_dot is not None:
        parts.append(xhat * at(scale_dot))
    if bias_dot is not None:
        parts.append(jnp.broadcast_to(at(bias_dot), xhat.shape))
    return sum(parts[1:], parts[0]).astype(norm.dtype)


@functools.cache
def _keep_codes(norm: Norm):
    """(x, scale, bias, mask, moments, kept) -> y, keeping the codes and a statistic."""

    @jax.custom_jvp
    def apply(x, scale, bias, mask, moments, kept):
        mean, raw = moments
        return affine(norm, x, mean, clipped(raw), scale, bias)

    @functools.partial(apply.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        x, scale, bias, mask, (mean, raw), kept = primals
        like = jax.ShapeDtypeStruct(x.shape, wide_dtype(x.dtype))
        dots = [t if is_nonzero(t) else None for t in tangents[:3]]
        linear = functools.partial(_tangent, norm, like)
        linear = jax.checkpoint(linear)  # with barriers, see `kept.py`
        y = affine(norm, x, mean, clipped(raw), scale, bias)
        return y, linear(kept, raw, scale, mask, dots)

    return apply


def keep_codes(
    norm: Norm, x, scale, bias, mask, quantization: Quantization, rng: Rng
) -> Array:
    """The norm's output; kept are codes of the normalised input, and its variance."""
    fixed = widen(lax.stop_gradient(x))
    mean, raw = raw_moments(norm, fixed, mask)
    raw = checkpoint_name(raw, norm.stats_name)
    plain = replace(norm, dtype=fixed.dtype)
    xhat = affine(plain, fixed, mean, clipped(raw), None, None)
    # Not of the output: the error does not grow where the scale is small, so no channel
    # needs guarding, and the layer after the norm recalls its input from the same
    # codes.
    kept = new_codes(xhat, quantization, seed_of(rng), stats=x.dtype)
    y = _keep_codes(norm)(x, scale, bias, mask, (mean, raw), kept)
    if norm.features == (x.ndim - 1,):
        remember(y, replace(kept, scale=scale, bias=bias))
    return y
