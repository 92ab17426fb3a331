"""The errors of wrong arguments, and how a value is shown in them."""

from typing import Any

import numpy as np

_SHOWN = 100  # characters of a value in a message


def shown(value: Any) -> str:
    """A value as messages show it: arrays by dtype and shape, long texts cut."""
    text = " ".join(_shown(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def array_text(x: Any) -> str:
    """What is known of an array, as "float32[8,128]"."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _shown(value: Any) -> str:
    if _is_array(value):
        return array_text(value)
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
