"""Name scopes for modules of frameworks that open none, as linen's modules have them.

nnx traces a module's `__call__` without `jax.named_scope`. While `module_scopes` is
open, each call of a module is inside the scopes of its path below the module that calls
it: `Net/layers/0/mlp/up`. What is computed is the same.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxmem.frameworks.framework import Framework
from jaxmem.frameworks.registry import in_use

_LOCK = threading.Lock()
_OPEN = 0  # contexts that are open, in all threads
_ORIGINAL: dict[Any, Callable] = {}  # class -> its own `__call__`


class _Trace(threading.local):
    """What one thread is tracing."""

    depth = 0  # contexts that are open in this thread

    def __init__(self):
        self.calls: list[int] = []  # ids of the modules whose calls are open
        # id -> (module, id of its root, path below the root)
        self.known: dict[int, tuple[Any, int, tuple[str, ...]]] = {}


_TRACE = _Trace()


@contextlib.contextmanager
def module_scopes() -> Iterator[None]:
    """Calls of modules open name scopes while it is open."""
    if not _scoped_frameworks():
        yield
        return
    _TRACE.depth += 1
    _count(+1)
    try:
        yield
    finally:
        _count(-1)
        _TRACE.depth -= 1
        if not _TRACE.depth:
            _TRACE.known.clear()


def _count(change: int) -> None:
    """The first context wraps `__call__` of all classes, the last one unwraps it."""
    global _OPEN
    with _LOCK:
        _OPEN += change
        if _OPEN == 1 and change > 0:
            for framework in _scoped_frameworks():
                for cls in _classes(framework):
                    _ORIGINAL[cls] = vars(cls)["__call__"]
                    cls.__call__ = _scoped(_ORIGINAL[cls], framework)
        elif not _OPEN:
            while _ORIGINAL:
                cls, call = _ORIGINAL.popitem()
                cls.__call__ = call


def _scoped_frameworks() -> list[Framework]:
    return [f for f in in_use() if f.module_class() is not None]


def _classes(framework: Framework) -> set[Any]:
    """The classes of modules that have a `__call__` of their own."""
    found: set[Any] = set()
    left: list[Any] = [framework.module_class()]
    while left:
        subclasses = left.pop().__subclasses__()
        left += [cls for cls in subclasses if cls not in found]
        found |= set(subclasses)
    return {cls for cls in found if callable(vars(cls).get("__call__"))}


def _scoped(call: Callable, framework: Framework) -> Callable:
    module_class: Any = framework.module_class()

    @functools.wraps(call)
    def scoped(self, *args: Any, **kwargs: Any) -> Any:
        # A class calls its base's `__call__` on the same module, or on what stands in
        # for it with other parts.
        same = _TRACE.calls[-1:] == [id(self)] or not isinstance(self, module_class)
        if not _TRACE.depth or same:
            return call(self, *args, **kwargs)
        with contextlib.ExitStack() as stack:
            for name in _path(self, framework):
                stack.enter_context(jax.named_scope(name))
            _TRACE.calls.append(id(self))
            stack.callback(_TRACE.calls.pop)
            return call(self, *args, **kwargs)

    return scoped


def _path(module: Any, framework: Framework) -> tuple[str, ...]:
    """The path below the module whose call is open; a root's is its class's name."""
    known = _TRACE.known
    if id(module) not in known:
        _learn(module, framework)
    _, root, path = known[id(module)]
    if not path:
        name = type(module).__name__
        # `jaxmem.substitute` and the transforms of nnx call a copy of a module
        inside = _TRACE.calls and known[_TRACE.calls[-1]][0]
        return () if type(inside).__name__ == name else (name,)
    for caller in reversed(_TRACE.calls):
        _, above, start = known[caller]
        if above == root:
            below = path[: len(start)] == start and path != start
            return path[len(start) :] if below else path
    return (type(known[root][0]).__name__, *path)


def _learn(root: Any, framework: Framework) -> None:
    """Notes the paths of all modules below one that is in no module known so far."""
    module_class: Any = framework.module_class()
    for path, node in framework.parts(root):
        if isinstance(node, module_class):
            place = node, id(root), tuple(map(str, path))
            _TRACE.known.setdefault(id(node), place)
