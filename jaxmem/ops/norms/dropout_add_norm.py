"""Dropout, the residual sum and the norm of a transformer block, in one pass.

In plain XLA it is the composition of our own ops. A kernel reads `x` and the residual
once; its backward pass recomputes the mask, and writes the gradients over its inputs.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, UInt32

from jaxmem._checks import check_bool, check_choice, check_dtype, check_float, check_key
from jaxmem.ops.norms import kernels as kernels
from jaxmem.ops.norms.layer_norm import layer_norm, rms_norm
from jaxmem.ops.norms.moments import Norm, check_input, check_parameter
from jaxmem.ops.randomness.bits import seed_words
from jaxmem.ops.randomness.dropout import check_rate, dropout, need_rng
from pallas_kernels.dispatch import Implementation, considered


def dropout_add_layer_norm(
    x: Float[Array, "..."],
    residual: Float[Array, "..."],
    scale: Float[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    *,
    rate: float = 0.0,
    rng: Key[Array, ""] | UInt32[Array, "..."] | None = None,
    epsilon: float = 1e-6,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    save: str = "input",
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """`layer_norm(residual + dropout(x))`, and the sum, which is the next residual.

    Values are those of `dropout`, with the same mask, and `layer_norm`.

    Args:
        x: the output of a layer.
        residual: the stream that it is added to; its dtype is that of the sum.
        scale: one number for each element of the last axis, or None for ones.
        bias: as scale, or None for zeros.
        rate: of the dropout of `x`, a Python float in [0, 1].
        rng: a key, typed or raw. Needed unless `deterministic`, `rate` 0 or `rate` 1.
        epsilon: added to the variance.
        deterministic: True switches dropout off.
        dtype: of the norm; None: that of x.
        save: "input", or "output" where the next operation keeps the norm anyway and
            nothing keeps the sum. "output" is not exact: see `layer_norm`.
        implementation: "xla"; "pallas" for the kernel of a TPU or GPU, in reverse mode
            alone; None: the kernel where it was measured to be no slower.

    Returns:
        (the norm, the sum), in x's shape.

    Raises:
        ValueError: shapes that differ, a rate outside [0, 1], a missing key, another
            word for `save`, or no kernel does what "pallas" asks for.
        TypeError: x or residual is not of a real floating dtype.

    Saves:
        "input": the sum, 8 bytes a row (the kernel: none), and 8 bytes for the mask.
        "output": the norm, and what `layer_norm` keeps with it, and 8 bytes.
        Nothing for the mask where x is frozen; bias alone trained: nothing.

    Source:
        The pass and its name: flash-attention, Dao et al., NeurIPS 2022, arXiv
        2205.14135 (the library's layer_norm extension); the ops: see `dropout` and
        `layer_norm`.
    """
    options = _Options(rate, rng, epsilon, deterministic, dtype, save, implementation)
    return _apply("dropout_add_layer_norm", True, options, x, residual, scale, bias)


def dropout_add_rms_norm(
    x: Float[Array, "..."],
    residual: Float[Array, "..."],
    scale: Float[Array, "..."] | None = None,
    *,
    rate: float = 0.0,
    rng: Key[Array, ""] | UInt32[Array, "..."] | None = None,
    epsilon: float = 1e-6,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    save: str = "input",
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """`rms_norm(residual + dropout(x))`, and the sum, which is the next residual.

    Values are those of `dropout`, with the same mask, and `rms_norm`.

    Args:
        x: the output of a layer.
        residual: the stream that it is added to; its dtype is that of the sum.
        scale: one number for each element of the last axis, or None for ones.
        rate: as in `dropout_add_layer_norm`, like the arguments after it.
        epsilon: added to the mean square.

    Returns:
        (the norm, the sum), in x's shape.

    Raises:
        ValueError: as `dropout_add_layer_norm`.
        TypeError: x or residual is not of a real floating dtype.

    Saves:
        "input": the sum, 4 bytes a row (the kernel: none), and 8 bytes for the mask.
        "output": the norm, and what `rms_norm` keeps with it, and 8 bytes.
        Nothing for the mask where x is frozen.

    Source:
        As `dropout_add_layer_norm`; Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    options = _Options(rate, rng, epsilon, deterministic, dtype, save, implementation)
    return _apply("dropout_add_rms_norm", False, options, x, residual, scale, None)


class _Options(NamedTuple):
    """What is no array, as the caller gave it."""

    rate: Any
    rng: Any
    epsilon: Any
    deterministic: Any
    dtype: Any
    save: Any
    implementation: Implementation | None


def _check(op: str, x, residual, scale, bias) -> tuple[int, ...]:
    """The axis of the norm, of arguments that fit."""
    check_input(op, x)
    check_input(op, residual, "residual")
    if x.ndim == 0 or residual.shape != x.shape:
        raise ValueError(
            f"{op}: x {x.shape} and residual {residual.shape} must have the same "
            "shape, with at least one axis"
        )
    last = (x.ndim - 1,)
    check_parameter(op, "scale", scale, x, last)
    check_parameter(op, "bias", bias, x, last)
    return last


def _apply(op: str, centred: bool, given: _Options, x, residual, scale, bias):
    rate, rng, epsilon, deterministic, dtype, save, implementation = given
    last = _check(op, x, residual, scale, bias)
    rate = check_rate(rate)
    rate = 0.0 if check_bool("deterministic", deterministic) else rate
    if rng is not None:
        check_key("rng", rng)
    epsilon = check_float("epsilon", epsilon, at_least=0)
    check_choice(f"{op}: save", save, ("input", "output"))
    if dtype is not None:
        check_dtype("dtype", dtype)
    if 0.0 < rate < 1.0:
        need_rng(rng, rate, "rate", "rng")
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    options = {"epsilon": epsilon, "dtype": dtype, "save": save}
    options["implementation"] = None if implementation is None else "xla"
    norm = functools.partial(layer_norm, bias=bias) if centred else rms_norm

    def plain(x, residual):
        total = residual + dropout(x, rate, rng).astype(residual.dtype)
        return norm(total, scale, **options), total

    with jax.named_scope(f"jaxmem.{op}"):
        if not considered(op, implementation, x):
            return plain(x, residual)
        name = "layer_norm" if centred else "rms_norm"
        what = Norm(name, last, last, epsilon, dtype, centred)
        reason = kernels.unsupported(what, x.ndim, None, save)
        reason = "a rate below 1" if rate == 1.0 else reason
        if reason is not None:
            return kernels.refused(op, implementation, reason, plain, x, residual)
        seed = seed_words(rng) if rate else None
        call = kernels.AddNorm(op, what, save, implementation, rate)
        return kernels.add_norm(call, x, scale, bias, residual, seed)
