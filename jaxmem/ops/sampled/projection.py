"""Random projections of the rows: `P x` in place of x, with `E[P' P] = 1`.

P has independent entries of mean zero and variance `1 / k`, a function of the key and
the position. Source: Bershatsky et al. (2022), arXiv 2201.13195, section 2.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import _compat
from jaxmem.ops.common.lean import widen
from jaxmem.ops.randomness.bits import random_bits
from jaxmem.ops.sampled.gradient import product

# Of P at a time: 16 MiB in float32.
_BLOCK_ENTRIES = 2**22


def _rademacher(bits):
    return jnp.where(bits >> np.uint32(31) == 0, 1.0, -1.0)


def _gaussian(bits):
    # the middles of 2**23 equal parts of (-1, 1)
    uniform = (bits >> np.uint32(9)).astype(jnp.float32) * 2.0**-22 + (2.0**-23 - 1)
    return np.float32(np.sqrt(2)) * jax.lax.erf_inv(uniform)


ENTRIES: dict[str, Callable] = {"gaussian": _gaussian, "rademacher": _rademacher}


def blocks(k: int, rows: int) -> tuple[int, int]:
    """(blocks, rows of P in each): at least k rows in all."""
    count = max(1, -(-k * rows // _BLOCK_ENTRIES))
    return count, -(-k // count)


def _block(method: str, seed, n, size: int, x):
    """`size` rows of P, times the square root of k, in the dtype of x."""
    lane = jnp.arange(size, dtype=jnp.uint32)
    row = n.astype(jnp.uint32) * np.uint32(size) + lane
    column = jnp.arange(x.shape[0], dtype=jnp.uint32)
    bits = random_bits(seed, row[:, None], column[None])
    return ENTRIES[method](bits).astype(x.dtype)


def _scaled(x, factor: float):
    # Times a factor that is not rounded to the dtype of x.
    return (widen(x) * factor).astype(x.dtype)


def project(method: str, k: int, seed, x):
    """P x."""
    count, size = blocks(k, x.shape[0])

    def body(_, n):
        return None, product(_block(method, seed, n, size, x), x)

    steps = jnp.arange(count, dtype=jnp.int32)
    parts = jax.lax.scan(body, None, steps)[1]
    return _scaled(parts.reshape(count * size, -1), (count * size) ** -0.5)


def project_back(method: str, k: int, seed, rows: int, u):
    """P' u; transposed, which is what a backward pass runs, P g."""
    count, size = blocks(k, rows)
    like = jax.ShapeDtypeStruct((rows, 1), u.dtype)

    @jax.checkpoint  # or the blocks of P would be kept, stacked
    def body(total, step):
        n, part = step
        return total + product(_block(method, seed, n, size, like).T, part), None

    steps = jnp.arange(count, dtype=jnp.int32)
    parts = _scaled(u, (count * size) ** -0.5).reshape(count, size, -1)
    start = jnp.zeros_like(u, shape=(rows, u.shape[-1]))
    start = _compat.vary(start, _compat.varying_axes(u, seed))
    return jax.lax.scan(body, start, (steps, parts))[0]
