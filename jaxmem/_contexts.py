"""Contexts in which something is known to all that runs inside."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def set_within(variable: ContextVar[T], value: T) -> Iterator[None]:
    """A context in which a variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
