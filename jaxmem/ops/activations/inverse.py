"""The input of GELU or SiLU from its output and one bit.

Both fall to one minimum and rise after it, so output y and the side of the minimum
determine x. The kept bit is Tempo's idea (arXiv 2210.10246, section 3.1) and Inverted
Activations' (arXiv 2407.15545); the fits are our own.
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
from jaxmem.ops.common.lean import lean, of_input, widen

# The fit is right to 2e-6, and each step of Newton's doubles the digits of float64.
NEWTON_STEPS = 3
NEWTON_FROM = 1e-6  # of y - low: nearer to the minimum Newton's quotient is 0 / 0
LOG_SERIES = (1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5)
BOTTOM = 2.0**-7  # |x - argmin| below which `bottom` gives y


@dataclass(frozen=True)
class UnimodalFunction:
    """A function with one minimum `low` at `argmin`, and how to invert either side."""

    value: Callable[[Array], Array]
    slope: Callable[[Array], Array]
    argmin: float
    low: float
    bottom: tuple[float, ...]  # the Taylor series at the minimum, from the square on
    # x - argmin is s = sqrt(y - low) on the right, or q = sqrt(log(low / y)) on the
    # left, times a polynomial (lowest power first), of s - 1 or of q: x is smooth in
    # these, minimum and tail included, and powers of s itself would cancel in float32.
    # Weighted minimax fits (Lawson's iteration, 160 Chebyshev points, 40 digits) leave
    # an error of the derivative below 2e-6: less than rounding y to float32 costs near
    # the minimum (6e-5), where a Newton step would only add noise.
    right: tuple[float, ...]
    left: tuple[float, ...]
    # Beyond s_max and q_max the derivative is its limit to 2e-6.
    s_max: float
    q_max: float
    # The derivative itself, for outputs in bfloat16: on the right s times a polynomial
    # of s - 1, with s up to `near_one`, on the left y q times one of q. Fitted alike,
    # off by 4e-4 at most: to round a derivative near 1 to bfloat16 costs 2e-3.
    rising: tuple[float, ...]
    falling: tuple[float, ...]
    near_one: float


def polynomial(coefficients: tuple[float, ...], z: Array) -> Array:
    total = jnp.full_like(z, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * z + c
    return total


def _minus(x: Array, constant: float) -> Array:
    """x - constant, exact near it although `constant` is no float32."""
    head = float(np.float32(constant))
    return (x - head) - (constant - head)


def settled(unimodal: UnimodalFunction) -> Callable[[Array], Array]:
    """`unimodal.value` off by half an ulp near the minimum, as inverting needs."""

    def value(x):
        if x.dtype == jnp.float64:
            return unimodal.value(x)
        # Three ulps, as the plain float32 formula has, would cost 2e-4 of derivative.
        e = _minus(x, unimodal.argmin)
        head = float(np.float32(unimodal.low))
        rest = (unimodal.low - head) + e * e * polynomial(unimodal.bottom, e)
        return jnp.where(jnp.abs(e) < BOTTOM, head + rest, unimodal.value(x))

    return value


def _above_low(unimodal: UnimodalFunction, y: Array) -> Array:
    """y - low, never quite zero."""
    floor = float((8 * jnp.finfo(y.dtype).eps) ** 2)
    return jnp.maximum(_minus(y, unimodal.low), floor)


def _log_ratio(unimodal: UnimodalFunction, y: Array) -> Array:
    """log(low / y); a series where the quotient is too near 1 for `log`."""
    v = _above_low(unimodal, y) / -unimodal.low
    far = -jnp.log(jnp.maximum(y / unimodal.low, 0.0))
    return jnp.where(v < 1 / 16, v * polynomial(LOG_SERIES, v), far)


def start(
    unimodal: UnimodalFunction, y: Array, right: Array, sqrt: Any = jnp.sqrt
) -> Array:
    """`invert` but for Newton's steps, of which float32 needs none."""
    square = jnp.where(right, _above_low(unimodal, y), _log_ratio(unimodal, y))
    z = sqrt(square)
    s, q = jnp.minimum(z, unimodal.s_max), jnp.minimum(z, unimodal.q_max)
    rise = s * polynomial(unimodal.right, s - 1)
    fall = q * polynomial(unimodal.left, q)
    return unimodal.argmin + jnp.where(right, rise, fall)


def _newton(unimodal: UnimodalFunction, x: Array, y: Array) -> Array:
    safe = _above_low(unimodal, y) > NEWTON_FROM
    for _ in range(NEWTON_STEPS):
        d = unimodal.slope(x)
        step = (unimodal.value(x) - y) / jnp.where(d == 0, 1.0, d)
        x = jnp.where(safe & jnp.isfinite(step), x - step, x)
    return x


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def invert(
    unimodal: UnimodalFunction, y: Float[Array, "*shape"], right: Bool[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """The x right (or left) of the minimum with `unimodal.value(x) == y`."""
    x = start(unimodal, y, right)
    return _newton(unimodal, x, y) if y.dtype == jnp.float64 else x


@invert.defjvp
def _invert_jvp(unimodal, primals, tangents):
    x = invert(unimodal, *primals)
    d = unimodal.slope(x)
    flat = d == 0
    return x, jnp.where(flat, 0.0, tangents[0] / jnp.where(flat, 1.0, d))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def slope_of_rounded(
    unimodal: UnimodalFunction, y: Float[Array, "*shape"], right: Bool[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """The derivative where the value is `y`, which has the digits of bfloat16 alone."""
    above = jnp.where(right, y - unimodal.low, -jnp.log(y * (1 / unimodal.low)))
    z = jnp.sqrt(jnp.maximum(above, 0.0))
    s, q = jnp.minimum(z, unimodal.near_one), jnp.minimum(z, unimodal.q_max)
    rise = s * polynomial(unimodal.rising, s - 1)
    return jnp.where(right, rise, y * q * polynomial(unimodal.falling, q))


@slope_of_rounded.defjvp
def _slope_of_rounded_jvp(unimodal, primals, tangents):
    y, right = primals
    again = lambda y: unimodal.slope(invert(unimodal, y, right))
    return slope_of_rounded(unimodal, y, right), jax.jvp(again, (y,), tangents[:1])[1]


def from_input(name: str, unimodal: UnimodalFunction) -> Callable[[Array], Array]:
    """The op that keeps its input."""
    return lean(name, unimodal.value, unimodal.slope, of_input)


def from_output(
    name: str, unimodal: UnimodalFunction, factor: float = 1.0
) -> Callable[[Array], Array]:
    """As `from_input`, from its output and the side of the minimum the input lay on."""
    # x sigmoid(b x) is silu(b x) / b: its output y gives the inverse of SiLU at b y.
    scaled = (lambda x: x) if factor == 1 else (lambda x: factor * x)

    def keep(x, y):
        side = pack_bits(scaled(widen(x)) >= unimodal.argmin)
        return y, checkpoint_name(side, f"jaxmem_{name}_side")

    def form(value, slope_of):
        back = lambda y, side: slope_of(scaled(y), unpack_bits(side, y.shape))
        of_scaled = lambda x: value(x) if factor == 1 else value(scaled(x)) / factor
        return lean(name, of_scaled, back, keep)

    exact = lambda y, right: unimodal.slope(invert(unimodal, y, right))
    wide = form(settled(unimodal), exact)
    short = form(unimodal.value, partial(slope_of_rounded, unimodal))
    return lambda x: (short if x.dtype == jnp.bfloat16 else wide)(x)
