"""Softmax and log-softmax that keep their output alone.

The derivative of either is a function of its output. Inside, everything is float32
(or wider) and the result is rounded once to the input's dtype, where `jax.nn` rounds
each step to the input's dtype: for bfloat16 the values are closer to the exact ones.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float

from jaxmem._checks import check_array, check_key
from jaxmem.ops.codes.quantization import Quantization, SaveLike, bits_or_none
from jaxmem.ops.codes.stored import Rng, new_codes, remember, seed_of
from jaxmem.ops.common.lean import wide_dtype, widen
from jaxmem.ops.norms.moments import canonical_axes, check_mask, full_mask


def softmax(
    x: Float[Array, "..."],
    axis: int | Sequence[int] | None = -1,
    where: Bool[Array, "..."] | None = None,
    *,
    save: SaveLike | None = None,
    save_rng: Rng = None,
) -> Float[Array, "..."]:
    """Softmax, `exp(x) / sum(exp(x))`, as `jax.nn.softmax`.

    Args:
        x: the input, any shape.
        axis: the axis or axes that sum to one; None: all.
        where: the elements to include, broadcastable to x; the others give zero.
        save: bits a value (1 to 8) or a `Quantization`, to keep codes of the output:
            off by at most half a step, the spread of a block / 255 in 8 bits.
        save_rng: a key for stochastic rounding of the codes, another each step; None:
            to the nearest.

    Returns:
        An array of x's shape and dtype. A row of nothing but -inf gives NaN.

    Raises:
        ValueError: an axis out of range, or a `where` that does not fit x.
        TypeError: x is not of a real floating dtype.

    Saves:
        The output; with `save` its codes.

    Cost:
        By TPU v5e's cost analysis 0.9 times the bytes of `jax.nn.softmax` in a scan;
        1.25 times where both passes are one fusion, since the output is read back.

    Source:
        Bridle 1990; the derivative from the output: y * (g - sum(y * g)).
    """
    quantization = bits_or_none("softmax", save)
    check_array("softmax: x", x, "floating")
    if save_rng is not None:
        check_key("save_rng", save_rng)
    if quantization is None or x.size == 0:
        return _call("softmax", _softmax, x, axis, where)
    make = functools.partial(_softmax_codes, quantization, save_rng)
    return _call("softmax", make, x, axis, where)


def log_softmax(
    x: Float[Array, "..."],
    axis: int | Sequence[int] | None = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Log-softmax, `x - log(sum(exp(x)))`, as `jax.nn.log_softmax`.

    Args:
        x: the input, any shape.
        axis: the axis or axes over which the exponentials are summed; None: all.
        where: the elements to include, broadcastable to x; the others give -inf.

    Returns:
        An array of x's shape and dtype. A row of nothing but -inf gives NaN.

    Raises:
        ValueError: an axis out of range, or a `where` that does not fit x.
        TypeError: x is not of a real floating dtype.

    Saves:
        The output.

    Limits:
        The gradient takes exp of the rounded output: its error is that of one
        rounding of the output, `eps / 2 * |output|`, times the probability.

    Source:
        Bridle 1990; the derivative from the output: g - exp(y) * sum(g).
    """
    return _call("log_softmax", _log_softmax, x, axis, where)


def _call(op: str, make: Callable, x, axis, where) -> Array:
    check_array(f"{op}: x", x, "floating")
    axes = canonical_axes(range(x.ndim) if axis is None else axis, x.ndim)
    with jax.named_scope(f"jaxmem.{op}"):
        return make(axes)(x, check_mask(op, "where", where, x))


def _included(x: Array, where: Array | None, other: float) -> Array:
    mask = full_mask(where, x)
    return x if mask is None else jnp.where(mask, x, other)


def _shifted(x: Array, axes, where) -> Array:
    """x minus its largest included element, in the wide dtype."""
    logits = _included(widen(x), where, -jnp.inf)
    return logits - jax.lax.stop_gradient(jnp.max(logits, axes, keepdims=True))


@functools.cache
def _softmax(axes: tuple[int, ...]) -> Callable:
    return _keep_output("softmax", *_softmax_rule(axes))


def _softmax_rule(axes: tuple[int, ...]) -> tuple[Callable, Callable]:
    """The value, and the tangent from the output."""

    def value(x, where):
        e = _included(jnp.exp(_shifted(x, axes, where)), where, 0.0)
        return _included(e / e.sum(axes, keepdims=True), where, 0.0).astype(x.dtype)

    def tangent(y, where, u):
        # A masked element has p = 0, and so neither adds to the sum nor gets any.
        p = y.astype(u.dtype)
        return p * (u - (p * u).sum(axes, keepdims=True))

    return value, tangent


def _softmax_codes(
    quantization: Quantization, rng: Rng, axes: tuple[int, ...]
) -> Callable:
    """As `_softmax`, from codes of the output."""
    value, tangent = _softmax_rule(axes)

    def linear(kept, where, x_dot):
        like = jax.ShapeDtypeStruct(x_dot.shape, wide_dtype(x_dot.dtype))
        u = x_dot.astype(like.dtype)
        return tangent(kept.recall(like), where, u).astype(x_dot.dtype)

    @jax.custom_jvp
    def softmax(x, where, y, kept):
        return y

    @functools.partial(softmax.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        _, where, y, kept = primals
        return y, jax.checkpoint(linear, prevent_cse=False)(kept, where, tangents[0])

    def apply(x, where):
        fixed = value(jax.lax.stop_gradient(x), where)
        kept = new_codes(fixed, quantization, seed_of(rng))
        y = softmax(x, where, fixed, kept)
        remember(y, kept)
        return y

    return apply


@functools.cache
def _log_softmax(axes: tuple[int, ...]) -> Callable:
    def value(x, where):
        shifted = _shifted(x, axes, where)
        e = _included(jnp.exp(shifted), where, 0.0)
        y = shifted - jnp.log(e.sum(axes, keepdims=True))
        return _included(y, where, -jnp.inf).astype(x.dtype)

    def tangent(y, where, u):
        p = jnp.exp(y.astype(u.dtype))
        return _included(u - (p * u).sum(axes, keepdims=True), where, 0.0)

    return _keep_output("log_softmax", value, tangent)


def _keep_output(op: str, value: Callable, tangent: Callable) -> Callable:
    """`value` with a derivative from its output, which is all that is kept."""
    name = f"jaxmem_{op}_output"

    @jax.custom_jvp
    def apply(x, where):
        return value(x, where)

    @functools.partial(apply.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        x, where = primals
        y = checkpoint_name(value(x, where), name)
        u = tangents[0].astype(wide_dtype(x.dtype))
        return y, tangent(y, where, u).astype(x.dtype)

    policy = jax.checkpoint_policies.save_only_these_names(name)
    return jax.checkpoint(apply, prevent_cse=False, policy=policy)
