"""Checks of names, choices and functions."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jaxmem._checks.messages import wrong_type, wrong_value
from jaxmem._checks.numbers import check_numbers


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


def check_axis_name(name: str, value: Any) -> tuple[str, ...]:
    """The names of one mesh axis or several as a tuple; None is the empty one."""
    if value is None:
        return ()
    names = (value,) if isinstance(value, str) else value
    named = isinstance(names, tuple | list) and all(isinstance(n, str) for n in names)
    if not named or not names or not all(names):
        raise wrong_value(name, value, "a name or a tuple of names")
    return tuple(names)


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


def check_donated(numbers: Any, names: Any) -> tuple[int | str, ...]:
    """Of a function's own `donate_argnums` and `donate_argnames`."""
    return check_places(donate_argnums=numbers, donate_argnames=names)


def check_static(numbers: Any, names: Any) -> tuple[int | str, ...]:
    """Of a function's own `static_argnums` and `static_argnames`."""
    return check_places(static_argnums=numbers, static_argnames=names)
