"""What the normalisations share: axes, statistics in float32, the affine step."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxmem._checks import (
    check_array,
    check_axis_name,
    check_bool,
    check_dtype,
    check_float,
    check_numbers,
    shown,
    wrong_type,
)
from jaxmem._compat import is_for_tpu
from jaxmem.ops.common.lean import widen

Axes = int | Sequence[int]


@dataclass(frozen=True)
class Norm:
    """One normalisation: what is reduced, how, and into which dtype. Hashable."""

    name: str
    axes: tuple[int, ...]
    features: tuple[int, ...]
    epsilon: float
    dtype: Any
    centred: bool = True
    fast_variance: bool = True
    groups: int | None = None
    axis_name: Any = None
    axis_index_groups: tuple[tuple[int, ...], ...] | None = None

    @property
    def stats_name(self) -> str:
        return f"jaxmem_{self.name}_stats"


def make_norm(
    name: str,
    x: Array,
    parameters: dict[str, Any],
    *,
    dtype,
    epsilon,
    axis_name=None,
    **what,
) -> Norm:
    """The description of one call; its options and parameters (or None) checked."""
    for parameter, p in parameters.items():
        check_parameter(name, parameter, p, x, what["features"])
    across = check_axis_name("axis_name", axis_name)
    what["fast_variance"] = check_bool(
        "use_fast_variance", what.get("fast_variance", True)
    )
    return Norm(
        name=name,
        epsilon=check_float("epsilon", epsilon, at_least=0),
        dtype=jnp.dtype(x.dtype if dtype is None else check_dtype("dtype", dtype)),
        axis_name=across or None,
        axis_index_groups=index_groups(what.pop("axis_index_groups", None)),
        **what,
    )


def make_batch_norm(
    name: str, x: Array, axis: Axes, parameters: dict[str, Any], **options: Any
) -> Norm:
    """The description of a call over all axes but `axis`."""
    check_input(name, x)
    mean, var = parameters["mean"], parameters["var"]
    if (mean is None) != (var is None):
        raise ValueError(
            f"{name}: mean={shown(mean)}, var={shown(var)}: both or neither"
        )
    features = canonical_axes(axis, x.ndim)
    reduced = tuple(a for a in range(x.ndim) if a not in features)
    return make_norm(name, x, parameters, axes=reduced, features=features, **options)


def check_reduced(norm: Norm, ndim: int) -> None:
    """ValueError where batch statistics would be taken over nothing."""
    if not norm.axes:
        raise ValueError(f"{norm.name}: axis leaves none of {ndim} axes to reduce")


def canonical_axes(axis: Axes, ndim: int, name: str = "axis") -> tuple[int, ...]:
    """Sorted non-negative axes, or an error that names the argument."""
    given = check_numbers(name, axis)
    if not given:
        raise ValueError(f"{name}={axis!r}: at least one axis is needed")
    if any(not -ndim <= a < ndim for a in given):
        raise ValueError(f"{name}={axis!r} is out of range for {ndim} dimensions")
    axes = tuple(sorted({a % ndim for a in given}))
    if len(axes) != len(given):
        raise ValueError(f"{name}={axis!r} names an axis twice")
    return axes


def index_groups(groups: Any) -> tuple[tuple[int, ...], ...] | None:
    """`axis_index_groups` as something hashable."""
    if groups is None:
        return None
    allowed = "a sequence of sequences of ints, or None"
    several = isinstance(groups, list | tuple)
    if not several or not all(isinstance(g, list | tuple | np.ndarray) for g in groups):
        raise wrong_type("axis_index_groups", groups, allowed)
    return tuple(check_numbers("axis_index_groups", g, allowed) for g in groups)


def check_input(op: str, x: Array, name: str = "x") -> None:
    """Only real floating input has a mean and a variance here."""
    check_array(f"{op}: {name}", x, "floating")


def check_parameter(
    op: str, name: str, p: Array | None, x: Array, features: tuple[int, ...]
) -> None:
    """`scale` and `bias` run along the feature axes of x."""
    want = tuple(x.shape[a] for a in features)
    if p is not None and check_array(f"{op}: {name}", p).shape != want:
        raise ValueError(
            f"{op}: {name} has shape {p.shape}, "
            f"the feature axes {features} of x {x.shape} ask for {want}"
        )


def check_mask(op: str, name: str, mask: Array | None, x: Array) -> Array | None:
    """The mask as booleans, in its own shape: broadcast late, it is kept as it is."""
    if mask is None:
        return None
    if jnp.issubdtype(check_array(f"{op}: {name}", mask).dtype, jnp.inexact):
        raise wrong_type(f"{op}: {name}", mask, "an array of bools")
    trailing = x.shape[x.ndim - mask.ndim :] if mask.ndim <= x.ndim else ()
    if len(trailing) != mask.ndim or any(
        m not in (1, n) for m, n in zip(mask.shape, trailing, strict=True)
    ):
        raise ValueError(
            f"{op}: {name} of shape {mask.shape} does not broadcast to x {x.shape}"
        )
    return mask.astype(bool)


def full_mask(mask: Array | None, x: Array) -> Array | None:
    """The mask in x's shape."""
    return None if mask is None else jnp.broadcast_to(mask, x.shape)


def along(
    p: Array, like: Array | jax.ShapeDtypeStruct, features: tuple[int, ...]
) -> Array:
    """A parameter in `like`'s rank and dtype, broadcastable against it."""
    shape = [like.shape[a] if a in features else 1 for a in range(like.ndim)]
    return p.astype(like.dtype).reshape(shape)


def mean_over(norm: Norm, axes: tuple[int, ...], mask: Array | None, *xs: Array):
    """Means over `axes` (kept as ones) and over the named axis, one collective."""
    means = tuple(jnp.mean(x, axes, where=mask, keepdims=True) for x in xs)
    if norm.axis_name is not None:
        groups = norm.axis_index_groups
        means = jax.lax.pmean(means, norm.axis_name, axis_index_groups=groups)
    return means


def raw_moments(norm: Norm, wide: Array, mask: Array | None):
    """Mean (None if not centred) and variance before it is clipped at zero."""
    axes, mask = norm.axes, full_mask(mask, wide)
    if norm.groups is not None:
        split = (*wide.shape[:-1], norm.groups, wide.shape[-1] // norm.groups)
        wide = wide.reshape(split)
        mask = None if mask is None else mask.reshape(split)
        axes = (*axes[:-1], wide.ndim - 1)
    if not norm.centred:
        return None, mean_over(norm, axes, mask, wide * wide)[0]
    if not norm.fast_variance:
        (mean,) = mean_over(norm, axes, mask, wide)
        off = wide - mean
        return mean, mean_over(norm, axes, mask, off * off)[0]
    mean, square = mean_over(norm, axes, mask, wide, wide * wide)
    return mean, square - mean * mean


def clipped(raw_var: Array) -> Array:
    # Rounding may take E[x^2] - E[x]^2 below zero.
    return jnp.maximum(raw_var, 0.0)


def spread(norm: Norm, stat: Array, x: Array) -> Array:
    """A statistic broadcastable against x: group statistics repeat over channels."""
    if norm.groups is None:
        return stat
    size = x.shape[-1] // norm.groups
    wide = jnp.broadcast_to(stat, (*stat.shape[:-1], size))
    return wide.reshape(*stat.shape[:-2], x.shape[-1])


def affine(norm: Norm, x: Array, mean, var: Array, scale, bias) -> Array:
    """(x - mean) * (rstd * scale) + bias, in the wide dtype, rounded once."""
    y = widen(x)
    if mean is not None:
        y = y - spread(norm, mean, y)
    factor = spread(norm, jax.lax.rsqrt(var + norm.epsilon), y)
    if scale is not None:
        factor = factor * along(scale, y, norm.features)
    y = y * factor
    if bias is not None:
        y = y + along(bias, y, norm.features)
    return y.astype(norm.dtype)


def _normalize(norm: Norm, x, scale, bias, mask):
    """The output, the mean and the clipped variance (statistics with ones kept)."""
    mean, raw = raw_moments(norm, widen(x), mask)
    if mean is not None:
        mean = checkpoint_name(mean, norm.stats_name)
    var = clipped(checkpoint_name(raw, norm.stats_name))
    return affine(norm, x, mean, var, scale, bias), mean, var


def keep_input(norm: Norm, barriers: bool = True) -> Callable:
    """(x, scale, bias, mask) -> (y, mean, var), keeping x and its statistics.

    With barriers XLA does not merge the recomputation with the forward pass: of
    unrolled layers it otherwise keeps the output besides. A TPU has none: its compiler
    makes the output once more in the product that reads it, if it can fuse them.
    """
    return _keep_input(norm, barriers and not is_for_tpu())


@functools.cache
def _keep_input(norm: Norm, barriers: bool) -> Callable:
    # The statistics are named: recomputing a reduction costs a pass over the input.
    policy = jax.checkpoint_policies.save_only_these_names(norm.stats_name)
    # Partial evaluation drops what a frozen input does not need, and forward mode,
    # second derivatives and collectives come out of JAX itself.
    fn = functools.partial(_normalize, norm)
    return jax.checkpoint(fn, policy=policy, prevent_cse=barriers)
