"""Checks of numbers and of flags."""

import math
import numbers
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxmem._checks.messages import wrong_type, wrong_value


def check_int(
    name: str, value: Any, at_least: int | None = None, at_most: int | None = None
) -> int:
    """An int, a NumPy integer or a 0-d array of one, as a Python int."""
    allowed = f"an int{_range_text(at_least, at_most)}"
    if isinstance(value, bool | np.bool_) or getattr(value, "shape", ()) != ():
        raise wrong_type(name, value, allowed)
    try:
        number = operator.index(value)
    except TypeError:  # a traced array, too
        raise wrong_type(name, value, allowed) from None
    if not _in_range(number, at_least, at_most):
        raise wrong_value(name, value, allowed)
    return number


def check_float(
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    infinite: bool = False,
) -> float:
    """Any real number or 0-d array as a Python float."""
    # NaN is an error, and so is an infinity unless `infinite`.
    allowed = f"a number{_range_text(at_least, at_most, above, below)}"
    number = _as_float(name, value, allowed)
    inside = _in_range(number, at_least, at_most, above, below)
    if not inside or (math.isinf(number) and not infinite):
        raise wrong_value(name, value, allowed)
    return number


def check_scalar(name: str, value: Any, **limits: Any) -> Any:
    """A real number as in `check_float`, or a 0-d JAX array."""
    # The value of a JAX array is not read: it may be traced or not be computed yet.
    import jax

    if not isinstance(value, jax.Array):
        number = check_float(name, value, **limits)
        return value if isinstance(value, int | float) else number
    allowed = f"a number{_range_text(**limits)}"
    if value.shape != () or not _is_real(value.dtype):
        raise wrong_type(name, value, f"{allowed}, or a scalar array")
    return value


def check_count(name: str, value: Any) -> Any:
    """An int of at least 1, or a 0-d integer JAX array, whose value is not read."""
    import jax

    if not isinstance(value, jax.Array):
        return check_int(name, value, 1)
    if value.shape != () or value.dtype.kind not in "iu":
        raise wrong_type(name, value, "an int, at least 1, or a scalar array of one")
    return value


def check_bool(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool | np.bool_):
        raise wrong_type(name, value, "True or False")
    return bool(value)


def check_numbers(name: str, value: Any, allowed: str | None = None) -> tuple[int, ...]:
    """An int or several, such as positions of arguments or axes."""
    allowed = allowed or "an int, or a sequence of ints"
    try:
        return tuple(check_int(name, x) for x in _as_iterable(value))
    except TypeError:
        raise wrong_type(name, value, allowed) from None


def _as_iterable(value: Any) -> Iterable[Any]:
    if isinstance(value, str | bytes | Mapping):
        raise TypeError(value)
    if getattr(value, "shape", None) == () or not isinstance(value, Iterable):
        return (value,)
    return tuple(value)


def _is_real(dtype: Any) -> bool:
    import jax.numpy as jnp

    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)


def _as_float(name: str, value: Any, allowed: str) -> float:
    if hasattr(value, "dtype"):
        number = getattr(value, "shape", None) == () and _is_real(value.dtype)
    else:
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number:
        raise wrong_type(name, value, allowed)
    try:
        return float(value)
    except TypeError:  # a traced array
        raise wrong_type(name, value, f"{allowed} that is known here") from None


def _in_range(number, at_least=None, at_most=None, above=None, below=None) -> bool:
    """Whether a number is within the limits; NaN never is."""
    return (
        number == number
        and (at_least is None or number >= at_least)
        and (at_most is None or number <= at_most)
        and (above is None or number > above)
        and (below is None or number < below)
    )


def _range_text(
    at_least=None, at_most=None, above=None, below=None, infinite=False
) -> str:
    limits = [
        f"{words} {limit:g}" if isinstance(limit, float) else f"{words} {limit}"
        for words, limit in (
            ("at least", at_least),
            ("more than", above),
            ("at most", at_most),
            ("less than", below),
        )
        if limit is not None
    ]
    return f", {' and '.join(limits)}" if limits else ""
