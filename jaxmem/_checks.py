"""Checks of arguments.

Each check returns the argument in one plain form, or raises an error with its name, its
value and what is allowed: TypeError for a value of another kind, ValueError for one of
the right kind but out of range. NumPy's numbers and 0-d arrays of NumPy and JAX count
as numbers; a bool does not.
"""

import math
import numbers
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

_SHOWN = 100  # characters of a value in a message


def shown(value: Any) -> str:
    """A value as messages show it: arrays by dtype and shape, long texts cut."""
    text = " ".join(_shown(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _shown(value: Any) -> str:
    if _is_array(value):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {_shown(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        pairs = zip(value._fields, value, strict=True)  # pyright: ignore
        fields = ", ".join(f"{k}={_shown(v)}" for k, v in pairs)
        return f"{type(value).__name__}({fields})"
    if type(value) is tuple:
        comma = "," if len(value) == 1 else ""
        return f"({', '.join(map(_shown, value))}{comma})"
    return repr(value)


def _is_array(value: Any) -> bool:
    """False for NumPy's numbers, whose text is the number."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if dtype is None or not isinstance(shape, tuple):
        return False
    return bool(shape) or not isinstance(value, np.ndarray | np.generic)


def wrong_type(name: str, value: Any, allowed: str) -> TypeError:
    """The error for a value of another kind."""
    return TypeError(f"{name}={shown(value)}: {allowed}")


def wrong_value(name: str, value: Any, allowed: str) -> ValueError:
    """The error for a value out of range."""
    return ValueError(f"{name}={shown(value)}: {allowed}")


def check_int(
    name: str, value: Any, at_least: int | None = None, at_most: int | None = None
) -> int:
    """An int, a NumPy integer or a 0-d array of one, as a Python int."""
    allowed = f"an int{_range_text(at_least, at_most)}"
    if _is_bool(value) or getattr(value, "shape", ()) != ():
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


def check_choice(name: str, value: Any, choices: Collection[Any]) -> Any:
    """One of the choices, which may include None."""
    if any(value is c or (isinstance(value, str) and value == c) for c in choices):
        return value
    wrong = wrong_value if isinstance(value, str) else wrong_type
    raise wrong(name, value, f"one of {', '.join(map(repr, choices))}")


def check_callable(name: str, value: Any, allowed: str = "a function") -> Any:
    """A callable."""
    if not callable(value):
        raise wrong_type(name, value, allowed)
    return value


def check_text(name: str, value: Any, allowed: str = "a text") -> str:
    """A string that is not empty."""
    if not isinstance(value, str):
        raise wrong_type(name, value, allowed)
    if not value:
        raise wrong_value(name, value, f"{allowed} that is not empty")
    return value


def check_options(name: str, value: Any) -> dict[str, Any] | None:
    """A dict with strings as keys, or None."""
    named = isinstance(value, Mapping) and all(isinstance(k, str) for k in value)
    if value is not None and not named:
        raise wrong_type(name, value, "a dict from names to values, or None")
    return None if value is None else dict(value)


def check_dtype(name: str, value: Any, kind: str = "floating") -> np.dtype:
    """A dtype of one of NumPy's kinds: "floating", "inexact", "integer"."""
    import jax.numpy as jnp

    allowed = f"a {kind} dtype" if kind != "inexact" else "a floating or complex dtype"
    try:
        dtype = jnp.dtype(value)
    except (TypeError, ValueError):  # numpy's, by version
        wrong = wrong_value if isinstance(value, str) else wrong_type
        raise wrong(name, value, allowed) from None
    if value is None or not jnp.issubdtype(dtype, getattr(jnp, kind)):
        raise wrong_value(name, value, allowed)
    return dtype


def check_array(name: str, value: Any, kind: str | None = None) -> Any:
    """An array; of one of NumPy's kinds, such as "floating", if `kind` is given."""
    import jax
    import jax.numpy as jnp

    texts = {None: "an array", "bool_": "an array of bools"}
    allowed = texts.get(kind, f"an array of a {kind} dtype")
    dtype = getattr(value, "dtype", None)
    if dtype is None or isinstance(value, type | jax.ShapeDtypeStruct):
        raise wrong_type(name, value, allowed)
    if kind is not None and not jnp.issubdtype(dtype, getattr(jnp, kind)):
        raise wrong_type(name, value, allowed)
    return value


def check_axis_name(name: str, value: Any) -> tuple[str, ...]:
    """The names of one mesh axis or several as a tuple; None is the empty one."""
    if value is None:
        return ()
    names = (value,) if isinstance(value, str) else value
    named = isinstance(names, tuple | list) and all(isinstance(n, str) for n in names)
    if not named or not names or not all(names):
        raise wrong_value(name, value, "a name or a tuple of names")
    return tuple(names)


def check_precision(name: str, value: Any) -> Any:
    """A precision as `jax.lax` takes it: one, or one for each operand."""
    both = type(value) is tuple and len(value) == 2
    if not all(map(_is_precision, value if both else (value,))):
        wrong = wrong_value if isinstance(value, str) else wrong_type
        raise wrong(name, value, "a jax.lax.PrecisionLike, such as 'highest'")
    return value


def _is_precision(value: Any) -> bool:
    from jax import lax

    if not isinstance(value, str):
        kinds = lax.Precision | lax.DotAlgorithm | lax.DotAlgorithmPreset | None
        return isinstance(value, kinds)
    try:
        lax.Precision(value)
    except ValueError:
        return value in lax.DotAlgorithmPreset.__members__
    return True


def check_key(name: str, value: Any) -> Any:
    """One random key, typed or raw."""
    import jax

    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    allowed = (
        "is no key: one of jax.random.key(...), or a raw one of jax.random.PRNGKey"
    )
    typed = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    if not typed and dtype != np.uint32:
        raise wrong_type(name, value, allowed)
    if len(shape or ()) != (0 if typed else 1):
        raise wrong_value(name, value, allowed)
    return value


def check_numbers(name: str, value: Any, allowed: str | None = None) -> tuple[int, ...]:
    """An int or several, such as positions of arguments or axes."""
    allowed = allowed or "an int, or a sequence of ints"
    try:
        return tuple(check_int(name, x) for x in _as_iterable(value))
    except TypeError:
        raise wrong_type(name, value, allowed) from None


def check_names(name: str, value: Any, empty: bool = False) -> tuple[str, ...]:
    """A name or several; with `empty` there may be none."""
    allowed = "a name, or a sequence of names"
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Iterable) or isinstance(names, Mapping):
        raise wrong_type(name, value, allowed)
    names = tuple(names)
    if not all(isinstance(x, str) for x in names):
        raise wrong_type(name, value, allowed)
    if not names and not empty or not all(names):
        raise wrong_value(name, value, f"{allowed} that are not empty")
    return names


def check_places(**places: Any) -> tuple[int | str, ...]:
    """Numbers of a `..._argnums` and names of a `..._argnames`; None is none."""
    checked: list[int | str] = []
    for name, value in places.items():
        if value is not None and name.endswith("names"):
            checked += check_names(name, value, empty=True)
        elif value is not None:
            checked += check_numbers(name, value)
    return tuple(checked)


def _as_iterable(value: Any) -> Iterable[Any]:
    if isinstance(value, str | bytes | Mapping):
        raise TypeError(value)
    if getattr(value, "shape", None) == () or not isinstance(value, Iterable):
        return (value,)
    return tuple(value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


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
