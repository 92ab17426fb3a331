"""The input of GELU or SiLU from its output and one bit.

Both fall to one minimum and rise after it, so output y and the side of the minimum
determine x. Right of it x is smooth in s = sqrt(y - low), left of it in
q = sqrt(log(low / y)), minimum and tail included: x - argmin is s (or q) times a
polynomial. The coefficients are weighted minimax fits (Lawson's iteration on 160
Chebyshev points in 40-digit arithmetic) to the error of the derivative, which stays
below 8e-6: less than rounding y to float32 costs near the minimum (6e-5), where a
Newton step in float32 would only add noise. In float64 three Newton steps follow.
The idea of the kept branch bit is Tempo's (arXiv 2210.10246, section 3.1) and
Inverted Activations' (arXiv 2407.15545); the fits are our own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from jaxmem._bits import pack_bits, unpack_bits
from jaxmem.ops._elementwise import lean, of_input, wide

NEWTON_STEPS = 3
NEWTON_FROM = 1e-6  # of y - low: nearer to the minimum Newton's quotient is 0 / 0


LOG_SERIES = (1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5)
BOTTOM = 2.0**-7  # |x - argmin| below which `bottom` gives y


@dataclass(frozen=True)
class Valley:
    """A function with one minimum `low` at `argmin`, and how to invert either side.

    `bottom` is its Taylor series at the minimum from the square on. `right` and `left`
    are polynomials in s and q, lowest power first, that hold up to `s_max` and
    `q_max`; beyond, the derivative is its limit to 1e-5.
    """

    value: Callable[[Array], Array]
    slope: Callable[[Array], Array]
    argmin: float
    low: float
    bottom: tuple[float, ...]
    right: tuple[float, ...]
    left: tuple[float, ...]
    s_max: float
    q_max: float


def polynomial(coefficients: tuple[float, ...], z: Array) -> Array:
    total = jnp.full_like(z, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * z + c
    return total


def _minus(x: Array, constant: float) -> Array:
    """x - constant, exact near it although `constant` is no float32."""
    head = float(np.float32(constant))
    return (x - head) - (constant - head)


def settled(valley: Valley) -> Callable[[Array], Array]:
    """`valley.value` with half an ulp of error near the minimum, as inverting needs.

    Three ulps, as the plain float32 formula has them, would cost 2e-4 of derivative.
    """

    def value(x):
        if x.dtype == jnp.float64:
            return valley.value(x)
        e = _minus(x, valley.argmin)
        head = float(np.float32(valley.low))
        rest = (valley.low - head) + e * e * polynomial(valley.bottom, e)
        return jnp.where(jnp.abs(e) < BOTTOM, head + rest, valley.value(x))

    return value


def _above_low(valley: Valley, y: Array) -> Array:
    """y - low, never quite zero."""
    floor = float((8 * jnp.finfo(y.dtype).eps) ** 2)
    return jnp.maximum(_minus(y, valley.low), floor)


def _log_ratio(valley: Valley, y: Array) -> Array:
    """log(low / y); a series where the quotient is too near 1 for `log`."""
    v = _above_low(valley, y) / -valley.low
    far = -jnp.log(jnp.maximum(y / valley.low, 0.0))
    return jnp.where(v < 1 / 16, v * polynomial(LOG_SERIES, v), far)


def start(valley: Valley, y: Array, right: Array, sqrt: Any = jnp.sqrt) -> Array:
    """`invert` but for Newton's steps, of which float32 needs none."""
    square = jnp.where(right, _above_low(valley, y), _log_ratio(valley, y))
    z = sqrt(square)
    s, q = jnp.minimum(z, valley.s_max), jnp.minimum(z, valley.q_max)
    rise = s * polynomial(valley.right, s)
    fall = q * polynomial(valley.left, q)
    return valley.argmin + jnp.where(right, rise, fall)


def _newton(valley: Valley, x: Array, y: Array) -> Array:
    safe = _above_low(valley, y) > NEWTON_FROM
    for _ in range(NEWTON_STEPS):
        d = valley.slope(x)
        step = (valley.value(x) - y) / jnp.where(d == 0, 1.0, d)
        x = jnp.where(safe & jnp.isfinite(step), x - step, x)
    return x


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def invert(
    valley: Valley, y: Float[Array, "*shape"], right: Bool[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """The x right (or left) of the minimum with `valley.value(x) == y`."""
    x = start(valley, y, right)
    return _newton(valley, x, y) if y.dtype == jnp.float64 else x


@invert.defjvp
def _invert_jvp(valley, primals, tangents):
    x = invert(valley, *primals)
    d = valley.slope(x)
    flat = d == 0
    return x, jnp.where(flat, 0.0, tangents[0] / jnp.where(flat, 1.0, d))


def from_input(name: str, valley: Valley) -> Callable[[Array], Array]:
    """The op that keeps its input."""
    return lean(name, valley.value, valley.slope, of_input)


def from_output(name: str, valley: Valley) -> Callable[[Array], Array]:
    """The op that keeps its output, and on which side of the minimum the input lay."""

    def keep(x, y):
        side = pack_bits(wide(x) >= valley.argmin)
        return y, checkpoint_name(side, f"jaxmem_{name}_side")

    def slope(y, side):
        return valley.slope(invert(valley, y, unpack_bits(side, y.shape)))

    return lean(name, settled(valley), slope, keep)
