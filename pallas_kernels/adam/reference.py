"""Adam's update of a tile and of a whole leaf: shared parts and reference.

A tile is a dict of the same elements of the parameter "p", the moments "m" and "v" and
the gradient "g". Without "p" only the moments are updated (AdamA's micro-batch);
without "g" only the parameter is.

Arithmetic is float32, or float64 for a whole leaf with a float64 array. A bfloat16
parameter is rounded to nearest. With random bits it is rounded up or down, with
probabilities that make the mean exact: 16 random bits are added below the mantissa that
is kept, and the rest is cut off. The bits of an element depend on its position in the
leaf (`hashing.py`: the last axis is the column, all others the row) and not on tiles,
so every implementation has the same.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.arrays import check_dtypes
from pallas_kernels.hashing import random_bits


class Factors(NamedTuple):
    """The scalars of an update, in the order of the vector that kernels take.

    `m <- m_decay m + m_add (scale g)`, `v <- v_decay v + v_add (scale g)^2`; then
    `p <- p - rate (m_unbias m / (sqrt(v_unbias v + eps_root) + eps) + decay p)`.
    """

    scale: Any
    m_decay: Any
    m_add: Any
    v_decay: Any
    v_add: Any
    m_unbias: Any
    v_unbias: Any
    eps: Any
    eps_root: Any
    decay: Any
    rate: Any


def written(old) -> tuple[str, ...]:
    """The names of the arrays that an update of `old` writes."""
    return ("p",) * ("p" in old) + ("m", "v") * ("g" in old)


def update_tile(old: dict[str, Any], f: Factors, bits=None, sqrt=jnp.sqrt):
    """The new tiles; the step is computed from moments before they are rounded."""
    wide = {name: x.astype(f.scale.dtype) for name, x in old.items()}
    m, v = wide["m"], wide["v"]
    new = {}
    if "g" in old:
        g = f.scale * wide["g"]
        m = f.m_decay * m + f.m_add * g
        v = f.v_decay * v + f.v_add * (g * g)
        new = {"m": m.astype(old["m"].dtype), "v": v.astype(old["v"].dtype)}
    if "p" in old:
        p = wide["p"]
        step = f.m_unbias * m / (sqrt(f.v_unbias * v + f.eps_root) + f.eps)
        p = p - f.rate * (step + f.decay * p)
        new["p"] = rounded(p, old["p"].dtype, bits)
    return new


def rounded(x, dtype, bits=None):
    """`x` in `dtype`; float32 to bfloat16 by the random `bits`, where there are any."""
    # A NaN stays one: adding bits to it could carry into the sign.
    if bits is None or not rounds_at_random(dtype):
        return x.astype(dtype)
    low = bits >> np.uint32(16)
    high = (lax.bitcast_convert_type(x, jnp.uint32) + low) & np.uint32(0xFFFF0000)
    cut = lax.bitcast_convert_type(high, jnp.float32)
    return jnp.where(x == x, cut, x).astype(dtype)


def rounds_at_random(dtype) -> bool:
    """Whether random bits have a meaning for a parameter of this dtype."""
    return dtype == jnp.bfloat16


def flat_positions(index, last: int, ndim: int):
    """(row, column) of elements by their place in the flattened leaf."""
    if ndim < 2:
        return jnp.zeros_like(index), index
    row = index // np.uint32(last)
    return row, index - row * np.uint32(last)


def leaf_positions(shape: tuple[int, ...]):
    """(row, column) of all elements of a leaf, as arrays that broadcast."""
    last = shape[-1] if shape else 1
    rows = jnp.arange(math.prod(shape[:-1]), dtype=jnp.uint32)
    lead = (*shape[:-1], 1) if shape else ()
    column = jnp.arange(last, dtype=jnp.uint32)
    column = column.reshape((1,) * (len(shape) - 1) + (last,) if shape else ())
    return rows.reshape(lead), column


def update_leaf(
    old: dict[str, Any], factors, seed=None, positions=None
) -> dict[str, Any]:
    """The new leaves by name, in plain jax; the kernels agree with it.

    Args:
      old: "m", "v", and one or both of "p" and "g", of one shape.
      factors: a vector in the order of `Factors`.
      seed: uint32[2] for random rounding; None rounds to nearest.
      positions: of the elements in their leaf, if `old` are parts of leaves.
    """
    is_double = any(x.dtype == jnp.float64 for x in old.values())
    factors = factors.astype(jnp.float64 if is_double else jnp.float32)
    bits = None
    if uses_bits(old, seed):
        shape = old["p"].shape
        bits = random_bits(seed, *(positions or leaf_positions(shape)))
        bits = jnp.broadcast_to(bits, shape)
    return update_tile(old, Factors(*factors), bits)


def uses_bits(old, seed) -> bool:
    """Whether an update rounds at random."""
    return seed is not None and "p" in old and rounds_at_random(old["p"].dtype)


def check_leaf(old, dtypes: tuple[str, ...]) -> None:
    """Raises NotImplementedError for a leaf that no kernel supports."""
    check_dtypes(dtypes, *old.values())
    if old["m"].size == 0:
        shape = old["m"].shape
        raise NotImplementedError(f"at least one element, not a leaf of {shape}")


def read_factors(ref) -> Factors:
    """The factors from a vector in a kernel's memory, one scalar at a time."""
    return Factors(*(ref[i] for i in range(len(Factors._fields))))
