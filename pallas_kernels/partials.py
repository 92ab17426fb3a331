"""Functions with static arguments, equal where these and the functions are.

JAX traces a function, and lowers an operation, once for all that are equal. Layers of
one kind call an op with equal arguments, and each call makes functions of its own.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HashablePartial:
    """A `functools.partial` that is compared by its function and arguments."""

    function: Callable[..., Any]
    static: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*self.static, *args, **dict(self.named), **kwargs)


def partial(
    function: Callable[..., Any], *static: Any, **named: Any
) -> Callable[..., Any]:
    """`functools.partial`, compared by value where nothing in it may hold an array."""
    # a cache that has it as its key would keep the array, or one that is traced
    one = HashablePartial(function, static, tuple(sorted(named.items())))
    if all(map(_holds_no_array, (function, *static, *named.values()))):
        return one
    return functools.partial(function, *static, **named)


def _holds_no_array(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_holds_no_array, value))
    if isinstance(value, functools.partial) or getattr(value, "__closure__", None):
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True
