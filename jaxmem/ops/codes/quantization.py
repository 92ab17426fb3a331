"""Numbers stored as codes of a few bits, with a step and an offset for each block.

Blocks of equal size lie along the last axis. A block of numbers from `low` to `high`
becomes the codes 0 .. 2^bits - 1 of `low + code * step`, or symmetric ones about zero.
In `float8_e4m3fn` a code is a floating number, and the step makes 448 of the largest.
Source: Mesa (arXiv 2111.11124); stochastic rounding: ActNN (arXiv 2104.14129); float8
in blocks: COAT (arXiv 2410.19313).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt32

from jaxmem._checks import check_bool, check_int, wrong_type, wrong_value
from jaxmem._float8 import DTYPE, LARGEST, encoded
from jaxmem.ops.codes.packing import (
    MOST_BITS,
    pack_codes,
    packed_codes_nbytes,
    unpack_codes,
)
from jaxmem.ops.common.lean import wide_dtype, widen
from jaxmem.ops.randomness.bits import positions, random_bits


@dataclass(frozen=True)
class Quantization:
    """How values are stored in a few bits: an option of ops and modules (`save=`).

    Args:
        bits: of a code, 1 to 8.
        block_size: at most so many neighbours along the last axis share a step and an
            offset; the axis is cut in equal blocks.
        symmetric: codes about zero, with a step and no offset. Half the bytes of the
            statistics; for values that lie to one side of zero twice the step.
        dtype: None for codes that are integers; `jnp.float8_e4m3fn` or its name for
            floating ones of 8 bits, which are symmetric. Their error is 2^-4 of the
            value itself, where integers have half a step of the block: less for
            values below a thirtieth of the block's range, more for others.

    Raises:
        ValueError: bits or block_size out of range, 1 bit about zero, another dtype, or
            one with fewer bits.

    Saves:
        bits / 8 byte an element, and for each block a step and (unless symmetric) an
        offset: in bfloat16 where the values are, else in float32.

    Source:
        Mesa, Pan et al., arXiv 2111.11124, section 3; float8: COAT, Xi et al., arXiv
        2410.19313.
    """

    bits: int = 8
    block_size: int = 128
    symmetric: bool = False
    dtype: Any = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            self._set_floating()
        least = 2 if check_bool("symmetric", self.symmetric) else 1
        ints = {"bits": (least, MOST_BITS), "block_size": (1, None)}
        for name, limits in ints.items():
            number = check_int(name, getattr(self, name), *limits)
            object.__setattr__(self, name, number)

    def _set_floating(self) -> None:
        if not _is_float8(self.dtype):
            raise wrong_value("dtype", self.dtype, f"{DTYPE.name} or None")
        if self.bits != MOST_BITS:
            raise wrong_value("bits", self.bits, f"8 with dtype={DTYPE.name}")
        check_bool("symmetric", self.symmetric)
        object.__setattr__(self, "dtype", DTYPE)
        object.__setattr__(self, "symmetric", True)

    def __str__(self) -> str:
        return f"{self.bits} bits" if self.dtype is None else DTYPE.name


# What `save=` takes: bits a value, a dtype, or all options.
SaveLike = int | DTypeLike | Quantization


class Codes(NamedTuple):
    """What is stored of an array; `low` is None where the codes are symmetric."""

    packed: Any
    step: Any
    low: Any


def _is_float8(dtype: Any) -> bool:
    """Whether this is `float8_e4m3fn`, as a dtype, a scalar type or its name."""
    if isinstance(dtype, str):
        return dtype == DTYPE.name
    return isinstance(dtype, type | np.dtype) and jnp.dtype(dtype) == DTYPE


def as_quantization(save: Any, name: str = "save") -> Quantization | None:
    """An int is the bits, a dtype that of the codes; None for something else (a word).

    Args:
        save: what the caller gave.
        name: of the argument, for errors.
    """
    if isinstance(save, Quantization):
        return save
    if save is not None and _is_float8(save):
        return Quantization(dtype=DTYPE)
    if isinstance(save, bool) or not isinstance(save, int | np.integer):
        return None
    check_int(name, save, 1, MOST_BITS)
    return Quantization(int(save))


def bits_or_none(op: str, save: Any) -> Quantization | None:
    """`as_quantization`, of ops whose only other choice is None."""
    if save is not None and as_quantization(save) is None:
        allowed = f"bits, {DTYPE.name}, a Quantization or None"
        raise wrong_type(f"{op}: save", save, allowed)
    return as_quantization(save)


def _split(size: int, block_size: int) -> tuple[int, int]:
    """(blocks, elements a block) of an axis; the last block may be padded."""
    count = -(-size // block_size)
    return count, -(-size // count)


def _in_blocks(x: Array, block_size: int) -> Array:
    """[..., blocks, elements], the axis continued by its last element."""
    count, size = _split(x.shape[-1], block_size)
    rest = count * size - x.shape[-1]
    if rest:
        # By its last element: zeros could widen the range of the last block.
        padding = [(0, 0)] * (x.ndim - 1) + [(0, rest)]
        x = jnp.pad(x, padding, mode="edge")
    return x.reshape(*x.shape[:-1], count, size)


def _flat(blocks: Array, size: int) -> Array:
    """The last two axes joined, without what `_in_blocks` added."""
    whole = blocks.reshape(*blocks.shape[:-2], -1)
    return jax.lax.slice_in_dim(whole, 0, size, axis=-1)


def _turned(stat: Array) -> Array:
    # The blocks before the rows: few of them would be padded to TPU's 128 lanes.
    return jnp.swapaxes(stat, -1, -2) if stat.ndim > 1 else stat


def _step_dtype(dtype: Any) -> Any:
    # Float16 has no exponents to spare for a step.
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype


def _outwards(x: Array, dtype: Any, sign: int) -> Array:
    """`x` in `dtype`, rounded up (sign 1) or down (-1), and exact where it can be."""
    if x.dtype == dtype:
        return x
    # A value beyond a rounded end would be clipped, and its error not bounded by a
    # step.
    return (x + sign * float(jnp.finfo(dtype).eps) * jnp.abs(x)).astype(dtype)


def _ends(
    quantization: Quantization, blocks: Array, dtype: Any
) -> tuple[Array, Array | None]:
    """Step and offset (None if symmetric) in the dtypes they are stored in."""
    levels = 2**quantization.bits - 1
    if quantization.dtype is not None:
        # up, so that the largest is not clipped
        reach = widen(jnp.max(jnp.abs(blocks), axis=-1)) / LARGEST
        return _outwards(reach, _step_dtype(dtype), 1), None
    if quantization.symmetric:
        low, reach = None, widen(jnp.max(jnp.abs(blocks), axis=-1)) / (levels // 2)
    else:
        low = _outwards(jnp.min(blocks, axis=-1), dtype, -1)
        high = jnp.max(blocks, axis=-1)
        reach = widen(high) / levels - widen(low) / levels
    # Up, so that the codes reach both ends whatever dtype the step is stored in.
    return _outwards(reach, _step_dtype(dtype), 1), low


def _uniform(seed: UInt32[Array, "2"], shape: tuple[int, ...]) -> Array:
    """Numbers in [0, 1), 24 bits each."""
    bits = random_bits(seed, *positions(shape))
    return (bits >> np.uint32(8)).reshape(shape).astype(jnp.float32) * 2.0**-24


def quantize(
    x: Float[Array, "..."],
    quantization: Quantization,
    seed: UInt32[Array, "2"] | None = None,
    stats: Any = None,  # dtype of offsets and so of the steps; that of `x` if None
) -> Codes:
    """The codes of `x`; stochastic rounding with a seed, to the nearest without."""
    values = x.reshape(x.shape or (1,))
    blocks = _in_blocks(values, quantization.block_size)
    step, low = _ends(
        quantization, blocks, jnp.dtype(x.dtype if stats is None else stats)
    )
    return _codes(x, blocks, quantization, step, low, seed)


def codes_at(
    x: Float[Array, "..."],
    quantization: Quantization,
    step: Float[Array, "... blocks"],
    low: Float[Array, "... blocks"] | None,
    seed: UInt32[Array, "2"] | None = None,
) -> Codes:
    """The codes of `x` with these steps and offsets; what is beyond them is clipped."""
    blocks = _in_blocks(x.reshape(x.shape or (1,)), quantization.block_size)
    return _codes(x, blocks, quantization, step, low, seed)


def _codes(
    x: Array,
    blocks: Array,
    quantization: Quantization,
    step: Array,
    low: Array | None,
    seed: Any,
) -> Codes:
    at = widen(step)[..., None]
    if quantization.dtype is not None:
        numbers = widen(blocks) / jnp.where(at > 0, at, 1.0)
        return _float8_codes(x, numbers, step, seed)
    offset = (
        -(2 ** (quantization.bits - 1)) * at if low is None else widen(low)[..., None]
    )
    # A block of equal numbers has a step of zero, and code 0 gives its offset back.
    place = (widen(blocks) - offset) / jnp.where(at > 0, at, 1.0)
    place = _flat(place, (x.shape or (1,))[-1])
    if seed is None:
        place = jnp.round(place)
    else:
        # Up or down with the probabilities that make the mean exact.
        place = jnp.floor(place + _uniform(seed, place.shape).astype(place.dtype))
    codes = jnp.clip(place, 0, 2**quantization.bits - 1).astype(jnp.uint8)
    stats = _turned(step), None if low is None else _turned(low)
    return Codes(pack_codes(codes.reshape(x.shape), quantization.bits), *stats)


def _float8_codes(x: Array, blocks: Array, step: Array, seed: Any) -> Codes:
    """The codes of values that are divided by the step already."""
    place = _flat(blocks, (x.shape or (1,))[-1]).reshape(x.shape)
    draw = None if seed is None else _uniform(seed, x.shape)
    return Codes(encoded(place.astype(jnp.float32), draw), _turned(step), None)


def dequantize(
    codes: Codes, quantization: Quantization, shape: tuple[int, ...]
) -> Float[Array, "..."]:
    """The array of shape `shape` that the codes stand for, in float32 or wider."""
    full = shape or (1,)
    dtype = wide_dtype(codes.step.dtype)
    values = codes.packed
    if quantization.dtype is None:
        values = unpack_codes(values, quantization.bits, shape)
    values = values.reshape(full)
    blocks = _in_blocks(values, quantization.block_size).astype(dtype)
    step = widen(_turned(codes.step))[..., None]
    if quantization.dtype is not None:
        out = blocks * step
    elif codes.low is None:
        out = (blocks - 2 ** (quantization.bits - 1)) * step
    else:
        out = widen(_turned(codes.low))[..., None] + blocks * step
    return _flat(out, full[-1]).reshape(shape)


def quantized_nbytes(
    shape: tuple[int, ...], dtype: Any, quantization: Quantization
) -> int:
    """Bytes of the codes of an array, their steps and offsets included."""
    full = shape or (1,)
    rows, dtype = int(np.prod(full[:-1])), jnp.dtype(dtype)
    count, _ = _split(full[-1], quantization.block_size)
    step = jnp.dtype(_step_dtype(dtype)).itemsize
    stat = step if quantization.symmetric else step + dtype.itemsize
    return packed_codes_nbytes(shape, quantization.bits) + rows * count * stat
