"""What is to go, and what has gone: each use says what to write instead.

`docs/policy.md` has the rules, "Deprecated" and "Removed" in the changelog the list.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def ignored_argument(
    argument: str, instead: str, removed_in: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the function takes a keyword that it no longer has, with a warning.

    Args:
      argument: the keyword; it has no effect.
      instead: what to do, for the warning.
      removed_in: the version from which on it is an error.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if argument in kwargs:
                del kwargs[argument]
                text = f"{function.__name__}: {argument} is deprecated, has no effect "
                text += f"and will be removed in jaxmem {removed_in}: {instead}"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        return called

    return decorate


def names_gone(
    module: str, since: str, instead: Mapping[str, str]
) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module that has lost names.

    An ImportError, since `from module import name` drops the text of others.

    Args:
      module: its name.
      since: the version that no longer has them.
      instead: name -> what to do.
    """

    def look_up(name: str) -> NoReturn:
        if name in instead:
            gone = f"{module} has no {name} since jaxmem {since}: {instead[name]}"
            raise ImportError(gone, name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return look_up
