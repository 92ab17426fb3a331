"""An exact forward pass, and a derivative from a code of a few bits an element.

What is kept is which stretch of the real line an input lies in; the derivative is one
number for each. Neither input nor output is kept, so it pays where nobody else keeps
them either.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, ArrayLike, Float, Shaped

from jaxmem._checks import (
    check_callable,
    check_choice,
    check_float,
    check_int,
    shown,
    wrong_type,
    wrong_value,
)
from jaxmem.ops.codes.packing import MOST_BITS, pack_codes, unpack_codes
from jaxmem.ops.common.lean import inexact, kept_linear, wide_dtype, widen
from jaxmem.ops.few_bit.jumps import as_breaks
from jaxmem.ops.few_bit.polygon import best_polygon
from jaxmem.ops.few_bit.steps import Table, best_steps, exact_steps, sample
from jaxmem.ops.few_bit.weight import as_weight

# Up to so many levels every comparison is an operation of its own, which XLA fuses; for
# more the graph would grow, and one comparison runs along an axis of borders.
UNROLLED = 16
OBJECTIVES = {"derivative": best_steps, "primitive": best_polygon}
INTERVAL = (-10.0, 10.0)


def fewbit_table(
    fn: Callable,
    bits: int,
    *,
    weight: Any = "uniform",
    interval: tuple[float, float] = INTERVAL,
    objective: str = "derivative",
    breaks: Sequence[float] | None = None,
) -> Table:
    """The best derivative in 2**bits steps for a function of a scalar.

    Args:
        fn: from a scalar to a scalar, differentiable by JAX, smooth but for jumps of
            its derivative, at which its value may jump, too.
        bits: 1 to 8.
        weight: where inputs lie: "uniform", "normal" (mean 0, spread 1), a histogram
            as a tuple (counts, edges), or an array of any shape with inputs of your
            own model.
        interval: (low, high), where the error is counted; outside of it the first and
            the last level hold.
        objective: what is least. "derivative": the integral of the weight times the
            squared difference of derivative and steps. "primitive": that of the squared
            difference of `fn` and a continuous function with these steps as slopes
            that goes over into the tangents of `fn` at the interval's ends.
        breaks: where the derivative jumps, inside of the interval; None: where it is
            found to.

    Returns:
        (borders, levels, error) in float64: `2**bits - 1` increasing borders, `2**bits`
        levels, and the integral (for "uniform" not divided by the interval's length). A
        border beside a jump is the jump itself, where that is best. If the derivative
        is constant between its jumps and has at most 2**bits values, the borders are
        the jumps, the levels these values, however often each occurs, and the error is
        zero.

    Raises:
        ValueError: bits or interval out of range, a derivative that jumps where
            `breaks` names no jump, or in 64 places, or that is not finite, a value that
            jumps elsewhere, a weight that is none, or that has nothing inside of the
            interval. A share of more than 0.1 % outside warns.
        TypeError: `fn` does not take a scalar to a scalar.

    Saves:
        Nothing: it is computed once, in numpy, in seconds at most for "derivative" and
        half a minute for "primitive" at 8 bits.

    Limits:
        "primitive" gives the best function of a neighbourhood; at more than 2 bits one
        that is a tenth nearer may exist.

    Source:
        Novikov et al., Few-Bit Backward, arXiv 2202.00441, section 3; "primitive":
        Yang et al., Approx-BP, arXiv 2406.16282, section 4.
    """
    bits = as_bits("fewbit_table", bits)
    check_choice("objective", objective, tuple(OBJECTIVES))
    interval = _as_interval(interval)
    places = as_breaks(breaks, interval)
    _check_scalar(fn)
    with np.errstate(under="ignore"):
        sampled = sample(fn, interval, as_weight(weight, interval), places)
        exact = exact_steps(sampled, 2**bits)
        return exact or OBJECTIVES[objective](sampled, 2**bits)


def as_bits(op: str, bits: Any) -> int:
    """A number of bits as an int; a bool is none."""
    return check_int(f"{op}: bits", bits, 1, MOST_BITS)


def _as_interval(interval) -> tuple[float, float]:
    allowed = "(low, high), finite and increasing"
    if isinstance(interval, str) or not isinstance(interval, Sequence | np.ndarray):
        raise wrong_type("interval", interval, allowed)
    ends = [check_float(f"interval={shown(interval)}: an end", e) for e in interval]
    if len(ends) != 2 or ends[0] >= ends[1]:
        raise wrong_value("interval", interval, allowed)
    return ends[0], ends[1]


def _check_scalar(fn: Callable) -> None:
    check_callable("fewbit: fn", fn, "a function of a scalar")
    try:
        out = jax.eval_shape(fn, jax.ShapeDtypeStruct((), jnp.float32))
    except Exception as error:
        raise TypeError(f"fewbit: {fn!r} does not take one scalar: {error}") from error
    leaf = getattr(out, "dtype", None)
    if leaf is None or out.shape or not jnp.issubdtype(leaf, jnp.floating):
        raise TypeError(f"fewbit: {fn!r} must give one real scalar, gives {out}")


def fewbit(
    fn: Callable[[Array], Array],
    bits: int | None = None,
    *,
    table: tuple | None = None,
    weight: Any = "uniform",
    interval: tuple[float, float] = INTERVAL,
    objective: str = "derivative",
    breaks: Sequence[float] | None = None,
) -> Callable[[Shaped[ArrayLike, "*shape"]], Float[Array, "*shape"]]:
    """The function `fn` of each element, its derivative from a code of a few bits.

    Args:
        fn: from a scalar to a scalar; as for `fewbit_table`, unless a table is given.
        bits: 1 to 8; with a table what its different levels need.
        table: (borders, levels), or what `fewbit_table` returns: the derivative is
            levels[i] between borders[i - 1], included, and borders[i].
        weight: as `interval` and `objective`: where and how a table is best, see
            `fewbit_table`. The table is made here, once.
        interval: where the table is made.
        objective: "derivative" or "primitive".
        breaks: where the derivative jumps; None: where it is found to.

    Returns:
        A function from an array of any shape (integers become floats) to one of its
        shape and dtype: `fn` in float32 or wider, rounded once.

    Raises:
        ValueError: neither bits nor table, a table that is none, and as `fewbit_table`.
        TypeError: `fn` does not take a scalar to a scalar.

    Saves:
        bits/8 byte an element, no input and no output; 1/8 byte where the derivative
        has two values, which is exact but at its jumps themselves: there it is that of
        the right-hand side.

    Limits:
        The gradient is that of another function, at the distance that `fewbit_table`
        tells; the second derivative is zero. Outside of the interval the first and last
        level hold: give one that holds your inputs if the derivative does not settle.

    Example::

        act = jaxmem.ops.fewbit(lambda x: x * jnp.exp(-x * x), bits=3, interval=(-4, 4))
        shrink = jaxmem.ops.fewbit(lambda x: jnp.where(abs(x) > 0.5, x, 0), bits=1)

    Source:
        Novikov et al., Few-Bit Backward, arXiv 2202.00441, section 3.
    """
    _check_scalar(fn)
    if table is None:
        if bits is None:
            raise ValueError("fewbit: bits=None: give bits=1 ... 8, or a table")
        how = {"weight": weight, "interval": interval, "objective": objective}
        table = fewbit_table(fn, bits, **how, breaks=breaks)
    op = coded("fewbit", jnp.vectorize(fn), *as_table(table, bits))

    def apply(x):
        return op(inexact("fewbit", x))

    return apply


def as_table(table: Any, bits: int | None = None) -> tuple[tuple, tuple]:
    """(borders, levels) as tuples of floats, checked."""
    try:
        borders, levels = (np.asarray(part, np.float64) for part in table[:2])
    except (TypeError, ValueError) as error:
        allowed = f"(borders, levels), of numbers: {error}"
        raise wrong_value("table", table, allowed) from None
    most = 2 ** (MOST_BITS if bits is None else as_bits("fewbit", bits))
    shapes = borders.ndim == 1 and levels.shape == (borders.size + 1,)
    if not shapes or len({*levels.tolist()}) > most:
        raise ValueError(
            f"table={shown(table)}: one level more than borders and at most {most} "
            "different levels are needed, "
            f"got shapes {borders.shape} and {levels.shape}"
        )
    if not (np.all(np.isfinite(levels)) and np.all(np.diff(borders) > 0)):
        raise wrong_value("table", table, "borders that increase, finite levels")
    return tuple(borders.tolist()), tuple(levels.tolist())


@functools.cache
def coded(
    name: str,
    value: Callable,
    borders: tuple[float, ...],
    levels: tuple[float, ...],
    narrow: bool = False,
) -> Callable[[Array], Array]:
    """The op `value` that keeps a code of its input, named "jaxmem_<name>_code"."""
    # A derivative may come back to a value that it has had: it is one code.
    values = [*dict.fromkeys(levels)]
    codes = [values.index(level) for level in levels]
    bits = max(1, (len(values) - 1).bit_length())

    def keep(x, y):
        code = _stretch(widen(x), borders)
        if len(values) < len(levels):
            code = _level(code, codes, jnp.uint8)
        return (checkpoint_name(pack_codes(code, bits), f"jaxmem_{name}_code"),)

    def push(kept, t):
        code = unpack_codes(kept[0], bits, t.shape)
        return _level(code, values, wide_dtype(t.dtype)) * widen(t)

    return kept_linear(name, value, push, keep, narrow=narrow)


def _stretch(x: Array, borders: Sequence[float]) -> Array:
    """How many borders are not above x."""
    if len(borders) < UNROLLED:
        zero = jnp.zeros(x.shape, jnp.uint8)
        return sum(((x >= b).astype(jnp.uint8) for b in borders), zero)
    above = jnp.expand_dims(x, 0) >= _column(borders, x)
    return jnp.sum(above, axis=0, dtype=jnp.int32).astype(jnp.uint8)


def _level(code: Array, levels: Sequence[float], dtype) -> Array:
    if len(levels) <= UNROLLED:
        return selected(code, [jnp.asarray(level, dtype) for level in levels])
    place = _column(range(len(levels)), code)
    chosen = jnp.where(
        jnp.expand_dims(code, 0) == place, _column(levels, code, dtype), 0
    )
    return jnp.sum(chosen, axis=0, dtype=dtype)


def _column(numbers: Sequence[float], like: Array, dtype=None) -> Array:
    """Numbers along an axis in front of those of `like`."""
    column = jnp.asarray(np.asarray(numbers), dtype or like.dtype)
    return column.reshape(-1, *(1,) * like.ndim)


def selected(code: Array, levels: Sequence[Any]) -> Any:
    """By a binary tree of selections, one for each bit of the code on the way."""
    if len(levels) == 1:
        return levels[0]
    half = 1 << ((len(levels) - 1).bit_length() - 1)
    low, high = selected(code, levels[:half]), selected(code, levels[half:])
    return jnp.where(code & half != 0, high, low)
