"""LayerNorm and RMSNorm that keep their output, which the next matmul keeps anyway.

Kept: the output y, the variance of each row, and, of the channels from which y says
least, the normalised input itself. The idea: In-Place ABN (Rota Bulo et al., CVPR 2018)
and Tempo (NeurIPS 2022, section 3.2); neither guards against small scales.
"""

import functools
import math
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jaxmem.ops.common.blocks import devices_of
from jaxmem.ops.common.explicit import sharding_of_taken, whole
from jaxmem.ops.common.gpu_barrier import gpu_barrier
from jaxmem.ops.common.lean import wide_dtype, widen
from jaxmem.ops.marks import UnrolledOnTpu, marked
from jaxmem.ops.norms.moments import (
    Norm,
    affine,
    along,
    clipped,
    full_mask,
    keep_input,
    mean_over,
    raw_moments,
)


def guarded_channels(size: int) -> int:
    """How many channels keep their normalised input exactly."""
    # Small beside the output, and one channel at least.
    return max(1, size // 64)


def _condition(scale: Array, bias: Array) -> Array:
    """|scale| / (|scale| + |bias|): 1 is best, 0 means y says nothing of xhat."""
    s, b = jnp.abs(scale), jnp.abs(bias)
    return s / jnp.maximum(s + b, jnp.finfo(s.dtype).tiny)


def _parameters(norm: Norm, x: Array, scale, bias) -> tuple[Array, Array]:
    """Scale and bias as wide vectors, ones and zeros where there is none."""
    wide, shape = wide_dtype(x.dtype), (x.shape[norm.features[0]],)
    s = jnp.ones(shape, wide) if scale is None else scale.astype(wide)
    b = jnp.zeros(shape, wide) if bias is None else bias.astype(wide)
    return s, b


def _inverse(scale: Array, bias: Array, eps: float) -> Array:
    """The factor that takes y - bias to xhat, shrunk where y is mostly rounding."""
    usable = jnp.abs(scale) >= jnp.finfo(scale.dtype).tiny
    # A constant of second derivatives: it is an estimate of noise, no part of the norm.
    q = jax.lax.stop_gradient(_condition(scale, bias))
    # The least squares estimate of xhat, which has variance one, from a value with that
    # noise: no division by zero, and the error of xhat never passes about one.
    shrink = jnp.where(usable, q * q / (q * q + (eps / 4) ** 2), 0.0)
    return shrink / jnp.where(usable, scale, 1.0)


# Beyond it a sort is as fast: there are as many comparisons as pairs.
_FEW = 2**13


def smallest(score: Array, count: int) -> Array:
    """The places of the smallest of [n], int32 [count], in order, as `top_k` has them.

    A GPU takes 50 us for `top_k` of 1,024 numbers, as long as for the whole norm, and
    3 us for the ranks of all by comparing each with each.
    """
    size = score.size
    if size > _FEW:
        return jax.lax.top_k(-score, count)[1]
    score = jnp.where(jnp.isnan(score), 0.0, score)  # each rank comes once
    places = jnp.arange(size, dtype=jnp.int32)
    before = score[None] < score[:, None]
    before |= (score[None] == score[:, None]) & (places[None] < places[:, None])
    rank = before.sum(axis=1, dtype=jnp.int32)
    here = rank[None] == jnp.arange(count, dtype=jnp.int32)[:, None]
    return jnp.where(here, places[None], 0).sum(axis=1, dtype=jnp.int32)


def guard(norm: Norm, x: Array, mean, raw: Array, scale, bias):
    """(places, normalised input in the output's dtype) of the guarded channels."""
    if scale is None and bias is None:
        return None, None
    score = jax.lax.stop_gradient(_condition(*_parameters(norm, x, scale, bias)))
    score = whole(score)  # the places are the same on all devices
    # More channels of zero scale than these get a zero gradient of scale, and their
    # share is missing in the gradient of x.
    index = smallest(score, guarded_channels(score.size))
    channel = norm.features[0]

    def some(stat):
        # The statistics of a batch norm run along the channels too.
        one = stat.shape[channel] == 1
        return stat if one else _taken(stat, index, channel)

    rstd = jax.lax.rsqrt(clipped(some(raw)) + norm.epsilon)
    columns = _taken(x, index, channel).astype(rstd.dtype)
    centred = columns if mean is None else columns - some(mean)
    columns = (centred * rstd).astype(norm.dtype)
    return checkpoint_name((index, columns), f"jaxmem_{norm.name}_guard")


def _taken(x: Array, index: Array, axis: int) -> Array:
    """`jnp.take`, on meshes of explicit axes too."""
    sharding = sharding_of_taken(x, index, axis)
    if sharding is None:
        return jnp.take(x, index, axis=axis)
    return x.at[(slice(None),) * axis + (index,)].get(out_sharding=sharding)


def _with_channels(
    norm: Norm, y: Array, index: Array, columns: Array
) -> tuple[Array, Array]:
    """y, with some of its channels replaced; which they are, bool [channels]."""
    # By a gather, which is fused with what reads it: to write channels into y would
    # take a copy of it.
    (channel,) = norm.features
    numbers = jnp.arange(index.size, dtype=index.dtype)
    here = index[:, None] == jnp.arange(y.shape[channel], dtype=index.dtype)[None]
    place = jnp.where(here, numbers[:, None], 0).sum(axis=0)
    exact = columns.astype(y.dtype).at[(slice(None),) * channel + (place,)]
    exact = exact.get(
        mode="promise_in_bounds",
        out_sharding=sharding_of_taken(columns, place, channel),
    )
    like = jax.ShapeDtypeStruct(y.shape, jnp.bool_)
    replaced = here.any(axis=0)
    return jnp.where(along(replaced, like, norm.features), exact, y), replaced


def _forward(norm: Norm, x, scale, bias, mask):
    """The output, its row statistics, and the guarded channels with their places."""
    name = f"jaxmem_{norm.name}"
    mean, raw = raw_moments(norm, widen(x), mask)
    y = affine(norm, x, mean, clipped(raw), scale, bias)
    raw = checkpoint_name(raw, norm.stats_name)
    y = checkpoint_name(y, f"{name}_output")
    return y, raw, *guard(norm, x, mean, raw, scale, bias)


def input_tangent(norm: Norm, xhat: Array, raw: Array, mask, u: Array) -> Array:
    """The tangent of the normalised input `xhat` for the tangent `u` of the input."""
    rstd = jax.lax.rsqrt(clipped(raw) + norm.epsilon)
    mask = full_mask(mask, xhat)
    means = mean_over(norm, norm.axes, mask, *((u, u * xhat)[not norm.centred :]))
    # Where the variance was clipped it does not depend on x.
    flow = u - xhat * jnp.where(raw > 0, means[-1], 0.0)
    return rstd * (flow - means[0] if norm.centred else flow)


# `eps` is that of the dtype in which the output was stored.
def recovery(norm: Norm, residuals, scale, bias, eps: float):
    """(y, scale, shift, w): the normalised input is `(y - shift) * w` by channel."""
    y, _, index, columns = residuals
    s, b = _parameters(norm, y, scale, bias)
    w = _inverse(s, b, eps)
    shift = b
    if index is not None:
        y, replaced = _with_channels(norm, y, index, columns)
        # by a choice, which is fused with what reads it, too
        w, shift = jnp.where(replaced, 1.0, w), jnp.where(replaced, 0.0, b)
    return y, s, shift, w


_GROUPS = 32  # of rows, or a few more: as many more blocks of a GPU sum them


def by_groups(row: Array, like: Array, features: tuple[int, ...]) -> Array:
    """A number for each channel, for all rows of `like`.

    Transposed it is a sum over rows, by groups of them and then over the groups.
    XLA:GPU sums 32 channels in a block of threads, which takes the rows in turn: of
    4,096 rows of 2,048 channels a kernel took an H200 250 us, eight times as long as
    its bytes.
    """
    if features != (like.ndim - 1,) or like.ndim < 2 or devices_of(like) > 1:
        return jnp.broadcast_to(along(row, like, features), like.shape)
    first, *rest, channels = like.shape
    left = max(1, _GROUPS // first) if rest else _GROUPS
    axis = 1 if rest else 0
    parts = math.gcd(like.shape[axis], left)
    shape = (
        *like.shape[:axis],
        parts,
        like.shape[axis] // parts,
        *like.shape[axis + 1 :],
    )
    ones = (1,) * (len(shape) - axis - 2)
    groups = jnp.broadcast_to(row, (*shape[: axis + 1], *ones, channels))
    # XLA would sum over both at once, as a TPU should
    return jnp.broadcast_to(gpu_barrier(groups), shape).reshape(like.shape)


def norm_tangent(
    norm: Norm, residuals, scale, bias, mask, tangents, eps: float, fixed: bool = False
) -> Array:
    """The linear map of the tangents (None: zero) that the residuals determine."""
    raw = residuals[1]
    x_dot, scale_dot, bias_dot = tangents
    y, s, shift, w = recovery(norm, residuals, scale, bias, eps)
    wide = y.astype(s.dtype)
    at = functools.partial(along, like=wide, features=norm.features)
    parts = []
    # The statistics were given, and do not depend on x.
    if x_dot is not None and fixed:
        rstd = jax.lax.rsqrt(clipped(raw) + norm.epsilon)
        parts.append(at(s) * (rstd * x_dot.astype(s.dtype)))
    elif x_dot is not None:
        xhat = (wide - at(shift)) * at(w)
        flow = input_tangent(norm, xhat, raw, mask, x_dot.astype(s.dtype))
        parts.append(at(s) * flow)
    row = None if bias_dot is None else bias_dot.astype(s.dtype)
    spread = functools.partial(by_groups, like=wide, features=norm.features)
    if scale_dot is not None:
        # Factors of a channel stay outside the product with y: transposed, they
        # come after the sum over rows, and XLA:GPU needs no float32 copy of it.
        step = w * scale_dot.astype(s.dtype)
        parts.append(wide * spread(step))
        row = -shift * step if row is None else row - shift * step
    if row is not None:
        parts.append(spread(row))
    return sum(parts[1:], parts[0]).astype(norm.dtype)


@functools.cache
def keep_output(norm: Norm) -> Callable:
    """(x, scale, bias, mask) -> y, keeping y, row statistics and guarded channels."""

    @jax.custom_jvp
    def apply(x, scale, bias, mask):
        mean, raw = raw_moments(norm, widen(x), mask)
        return affine(norm, x, mean, clipped(raw), scale, bias)

    @functools.partial(apply.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        _, scale, bias, mask = primals
        dots = [None if isinstance(t, SymbolicZero) else t for t in tangents[:3]]
        residuals = _forward(norm, *primals)
        eps = float(jnp.finfo(norm.dtype).eps)
        y_dot = norm_tangent(norm, residuals, scale, bias, mask, dots, eps)
        return residuals[0], y_dot

    names = (norm.stats_name, f"jaxmem_{norm.name}_output", f"jaxmem_{norm.name}_guard")
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    # No barriers, unlike `moments.keep_input`: they make an array of each slice of
    # scanned layers' outputs (BERT-Large: 2,116 MiB for 2,087). Of layers written out
    # XLA may then keep an output with its guarded channels beside the output itself.
    return jax.checkpoint(apply, prevent_cse=False, policy=policy)


# Bounded: epsilon may be another one in each call of a long-lived process.
@functools.lru_cache(maxsize=1024)
def marked_output(norm: Norm, given: tuple[bool, ...]) -> Callable:
    """(x, those given of scale, bias and mask) -> y, keeping y.

    Its call is marked, for the rewriter to put the form there that keeps x.
    """

    def of(form: Callable) -> Callable:
        def run(x, *rest):
            some = iter(rest)
            return form(x, *(next(some) if there else None for there in given))

        return run

    # the name tells everything: a record is found by it
    name = f"jaxmem_{norm.name}_output_{zlib.crc32(repr((norm, given)).encode()):08x}"
    from_input = of(lambda *arrays: keep_input(norm)(*arrays)[0])
    return marked(name, of(keep_output(norm)), UnrolledOnTpu(from_input))
