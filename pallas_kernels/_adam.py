"""Adam's update of a tile in jnp operations, and of a whole leaf: what kernels share.

A tile are the same elements of a parameter, its moments and its gradient, in a dict
with the names "p", "m", "v" and "g". Without "p" the gradient goes into the moments and
the parameter waits (AdamA's micro-batch); without "g" the moments make a step and stay
as they are.

Arithmetic is float32 (a whole leaf's float64 where an array of it is). A bfloat16
parameter is rounded to the nearest, or with random bits up or down, with the
probabilities that make the mean exact: 16 bits are added below the mantissa that is
kept, and the rest is cut off. The bits of an element are those of its place in the
leaf (`hashing.py`: the last axis is the column, all others the row), so they do not
depend on tiles, and are the same in every implementation.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
    """The names of what an update of these arrays writes."""
    return ("p",) * ("p" in old) + ("m", "v") * ("g" in old)


def update_tile(old: dict[str, Any], f: Factors, bits=None, sqrt=jnp.sqrt):
    """The new tiles. The step is made of moments that are not yet rounded."""
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
    """`x` in `dtype`; float32 to bfloat16 by the random `bits`, where there are any.

    A NaN stays one: adding bits to it could carry into the sign.
    """
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
    """The new leaves by name, in plain jax: what the kernels must agree with.

    Args:
      old: "m", "v", and one or both of "p" and "g", of one shape.
      factors: a vector in the order of `Factors`.
      seed: uint32[2] for random rounding, or None: to the nearest.
      positions: of the elements in their leaf, if these are a part of it.
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
    """NotImplementedError for what no kernel does."""
    found = sorted({x.dtype.name for x in old.values()} - set(dtypes))
    if found:
        raise NotImplementedError(f"{' and '.join(dtypes)}, not {', '.join(found)}")
    if old["m"].size == 0:
        shape = old["m"].shape
        raise NotImplementedError(f"at least one element, not a leaf of {shape}")


def as_specs(arrays) -> list[jax.ShapeDtypeStruct]:
    """What `out_shape` takes, varying over the mesh axes that the arrays vary over."""
    return jax.eval_shape(lambda xs: xs, list(arrays))
