"""`explained`: an error of memory that has run out is explained where it is raised."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxmem._checks import check_callable
from jaxmem.chips import Target, get_target
from jaxmem.explaining._explain import explain, has_error
from jaxmem.explaining._text import text_of
from jaxmem.monitoring import live_arrays

_TITLE = "jaxmem.explain:"


@contextmanager
def explained(
    named: Callable[[], Mapping[str, Any]] | None = None,
    *,
    target: str | Target | None = None,
) -> Iterator[None]:
    """Adds to an out-of-memory error what it means, and which arrays are alive.

    The error is raised on, with a note that Python prints below it. Other errors are
    left as they are. It may be used as a decorator, too.

    Args:
      named: a function that returns trees by name, for `jaxmem.live_arrays`. It is
        called at the error; the trees themselves would be kept alive.
      target: the chip, of `jaxmem.targets()`, for its memory.

    Raises:
      TypeError: `named` is no function, `target` no chip.
      ValueError: an unknown target.

    Example::

      with jaxmem.explained(lambda: {"state": state}):
          for batch in batches:
              state, loss = jax.jit(step)(state, batch)
    """
    if named is not None:
        check_callable("named", named, "a function that returns a dict of trees")
    if target is not None:
        get_target(target, check=False)
    try:
        yield
    except Exception as error:
        if not _is_told(error) and has_error(text_of(error)):
            error.add_note(_note(error, named, target))
        raise


def _is_told(error: Exception) -> bool:
    """By one such context inside of another."""
    return any(note.startswith(_TITLE) for note in getattr(error, "__notes__", ()))


def _note(error: Exception, named: Callable | None, target: Any) -> str:
    parts = [_TITLE, _or_why(lambda: explain(error, target=target))]
    parts += ["", _or_why(lambda: live_arrays(**(named() if named else {})))]
    return "\n".join(parts)


def _or_why(make: Callable[[], Any]) -> str:
    """The text of a result; the user's own error is never replaced by another."""
    try:
        return str(make())
    except Exception as error:
        return f"(not told: {type(error).__name__}: {error})"
