"""Functions whose backward pass reads some of their arguments from a few bits.

The forward pass is exact; the derivative is taken at the values that the codes stand
for. A second derivative takes the codes for constants.
"""

import contextvars
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Key, UInt32

from jaxmem import _compat
from jaxmem._checks import check_array, check_key, wrong_type
from jaxmem._contexts import set_within
from jaxmem.ir.jaxprs import exchanged
from jaxmem.ops.codes.quantization import (
    Quantization,
    SaveLike,
    as_quantization,
    dequantize,
    quantize,
)
from jaxmem.ops.randomness.bits import mix, seed_words

Rng = Key[Array, ""] | UInt32[Array, "..."] | None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scale", "bias", "partners"],
    meta_fields=["quantization", "function"],
)
@dataclass(frozen=True)
class StoredCodes:
    """Codes, and what takes the coded values to those that were stored."""

    codes: Any
    quantization: Quantization
    # A norm codes its normalised input, the layer after it takes that * scale + bias.
    scale: Any = None
    bias: Any = None
    # An activation codes its input (and its partners'), the layer after it `function`.
    function: Callable | None = None
    partners: "tuple[StoredCodes, ...]" = ()

    def recall(self, like: Any) -> Array:
        """What was stored, in shape and dtype of `like`."""
        x = dequantize(self.codes, self.quantization, like.shape)
        for p, apply in ((self.scale, jnp.multiply), (self.bias, jnp.add)):
            if p is not None:
                x = apply(x, jnp.broadcast_to(p.astype(x.dtype), x.shape))
        x = x.astype(like.dtype)
        if self.function is None:
            return x
        return self.function(x, *(codes.recall(like) for codes in self.partners))


class WithArray:
    """What has an array in `value`, with its shape and dtype."""

    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array."""
        return self.value.shape

    @property
    def ndim(self) -> int:
        """That of the array."""
        return self.value.ndim

    @property
    def dtype(self) -> Any:
        """That of the array."""
        return self.value.dtype


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value", "codes"], meta_fields=[]
)
@dataclass(frozen=True)
class Stored(WithArray):
    """An array and its codes, to give to several functions that store it once.

    Made by `stored`. A function that is given one computes with `value` in the forward
    pass, and keeps the codes for the backward pass.

    Args:
        value: the array.
        codes: its codes.

    Saves:
        The codes, where a derivative needs the array.
    """

    value: Any
    codes: Any = field(repr=False)

    def astype(self, dtype: Any) -> "Stored":
        """The array in another dtype, with the codes it has."""
        return replace(self, value=self.value.astype(dtype))


def seed_of(rng: Rng, stream: int = 0) -> UInt32[Array, "2"] | None:
    """Words for stochastic rounding, others for each stream; None without a key."""
    if rng is None:
        return None
    return mix(seed_words(rng) + np.uint32(stream))


def stored(x: Float[Array, "..."], save: SaveLike = 8, *, rng: Rng = None) -> Stored:
    """`x` and its codes, for functions that are to share them.

    Args:
        x: any floating array.
        save: bits a value, `jnp.float8_e4m3fn`, or a `Quantization`.
        rng: a key for stochastic rounding, another each step; None: to the nearest.

    Returns:
        A `Stored`, to give in place of `x` to `dense` and to functions made by
        `save_quantized`.

    Raises:
        ValueError: bits out of range.
        TypeError: x is not floating, or `save` is not bits.

    Saves:
        The codes once, however many functions read them: bits / 8 byte an element, a
        step and an offset a block.

    Example::

        x = jaxmem.ops.stored(x, 8)
        query, key, value = (jaxmem.ops.dense(x, w) for w in params["layers"]["kernel"])

    Source:
        Mesa, Pan et al., arXiv 2111.11124, section 3.
    """
    quantization = as_quantization(save)
    if quantization is None:
        raise wrong_type("stored: save", save, "bits or a Quantization")
    check_array("stored: x", x, "floating")
    if rng is not None:
        check_key("rng", rng)
    with jax.named_scope("jaxmem.stored"):
        return Stored(x, codes_of(x, quantization, seed_of(rng)))


# Pairs of an array and its codes, each with the trace that they belong to.
_shared: contextvars.ContextVar[list | None] = contextvars.ContextVar(
    "jaxmem_shared_codes", default=None
)


def sharing() -> AbstractContextManager[None]:
    """Inside, the codes of one and the same array are made once in each trace."""
    known = _shared.get()
    return set_within(_shared, [] if known is None else known)


def remember(x: Any, codes: StoredCodes | None) -> None:
    """Inside `sharing`, what stores `x` next takes these codes of it."""
    shared = _shared.get()
    if shared is not None and isinstance(x, jax.core.Tracer):
        shared.append((x, _compat.trace_state(), codes))


def remembered(x: Any, quantization: Quantization) -> StoredCodes | None:
    """Codes of `x` of no fewer bits and of the same kind, made in this very trace."""
    shared: list[Any] = _shared.get() or []
    for y, trace, codes in reversed(shared):
        if (
            x is y
            and trace == _compat.trace_state()
            and codes.quantization.bits >= quantization.bits
            and codes.quantization.dtype == quantization.dtype
        ):
            return codes
    return None


def codes_of(
    x: Array, quantization: Quantization, seed: Array | None = None
) -> StoredCodes | None:
    """The codes of `x`, apart from any derivative; None for nothing to code."""
    if x.size == 0:
        return None
    if (codes := remembered(x, quantization)) is None:
        codes = new_codes(lax.stop_gradient(x), quantization, seed)
        remember(x, codes)
    return codes


def new_codes(
    x: Array, quantization: Quantization, seed: Array | None = None, stats: Any = None
) -> StoredCodes:
    """New codes of `x`, under the name by which a remat policy may keep them."""
    return StoredCodes(
        checkpoint_name(quantize(x, quantization, seed, stats), "jaxmem_codes"),
        quantization,
    )


def is_nonzero(tangent: Any) -> bool:
    """Whether a tangent (of a rule with symbolic zeros) is there at all."""
    if tangent is None or isinstance(tangent, SymbolicZero):
        return False
    return tangent.dtype != jax.dtypes.float0


def linearized_at(
    fn: Callable[..., Any], args: Sequence[Array], kept: Sequence[StoredCodes | None]
) -> Any:
    """`fn(*args)`; its derivative is that at what was kept (None: at the argument)."""

    @jax.custom_jvp
    def op(args, kept):
        return fn(*args)

    @functools.partial(op.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        args, kept = primals
        wanted = [i for i, t in enumerate(tangents[0]) if is_nonzero(t)]
        likes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]

        def tangent(plain, kept, dots):
            at = [
                x if k is None else k.recall(like)
                for x, k, like in zip(plain, kept, likes, strict=True)
            ]

            some = lambda *xs: fn(*exchanged(at, wanted, xs))
            return jax.jvp(some, [at[i] for i in wanted], dots)[1]

        # A checkpoint keeps what its derivative needs: of a frozen argument nothing.
        plain = [x if k is None else None for x, k in zip(args, kept, strict=True)]
        dots = [tangents[0][i] for i in wanted]
        # With its barriers: else XLA recalls all codes of a layer before it needs any.
        return fn(*args), jax.checkpoint(tangent)(plain, kept, dots)

    return op(list(args), list(kept))
