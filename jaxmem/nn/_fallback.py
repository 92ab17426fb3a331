"""Where a lean layer cannot serve an option, Flax's own code runs, and says so once."""

import contextvars
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

from jaxmem._contexts import set_within

_listener: contextvars.ContextVar[Callable[[str], None] | None] = (
    contextvars.ContextVar("jaxmem_fallback_listener", default=None)
)
_said: set[str] = set()


def fall_back(layer: str, reason: str) -> None:
    """Tells the substitution under way, else warns once per layer and reason."""
    listener = _listener.get()
    if listener is not None:
        listener(reason)
        return
    text = f"jaxmem.nn {layer}: {reason}; Flax's own code runs, and saves no memory"
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=4)


def heard_by(listener: Callable[[str], None]) -> AbstractContextManager[None]:
    """Fallbacks inside go to `listener` instead of a warning."""
    return set_within(_listener, listener)
