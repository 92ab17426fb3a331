"""Errors that name the object which a step closes over and updates.

Such an object is not an argument, so no call can carry its new values.
"""

import contextlib
import functools
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from jaxmem.frameworks.framework import Framework
from jaxmem.frameworks.registry import in_use, is_object


@contextlib.contextmanager
def naming_closure(fn: Callable) -> Iterator[None]:
    """Turns an error about an object of another trace into one that names it."""
    try:
        yield
    except Exception as error:
        framework = next((f for f in in_use() if f.is_lost_update(error)), None)
        if framework is None:
            raise
        touched = _in_frames_of(framework, error.__traceback__)
        objects = _closed_over(fn).items()
        named = [(name, x) for name, x in objects if touched & _inside(framework, x)]
        names = ", ".join(f"`{name}` ({type(x).__name__})" for name, x in named)
        if not names:
            raise
        raise ValueError(
            f"{getattr(fn, '__name__', fn)} updates {names}, which it closes over: an "
            "object that a step updates must be one of its arguments, or its new "
            "values would be lost"
        ) from error


def _closed_over(fn: Any, depth: int = 3) -> dict[str, Any]:
    """The objects that a function reads but does not take, by name."""
    if depth == 0:
        return {}
    found: dict[str, Any] = {}
    while isinstance(fn, functools.partial):
        fn = fn.func
    inner = getattr(fn, "__wrapped__", None)
    if inner is not None:
        found |= _closed_over(inner, depth)
    if isinstance(fn, types.MethodType):
        found |= _objects_of("self", fn.__self__)
        fn = fn.__func__
    if not isinstance(fn, types.FunctionType):
        return found
    for name, value in _free_values(fn):
        found |= _objects_of(name, value)
        if callable(value):
            found |= _closed_over(value, depth - 1)
    return found


def _free_values(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = fn.__code__
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell that is not filled yet
            yield name, cell.cell_contents
    for name in code.co_names:
        if name in fn.__globals__:
            yield name, fn.__globals__[name]


def _objects_of(name: str, value: Any) -> dict[str, Any]:
    """The object itself, or those that a plain Python object holds."""
    if is_object(value):
        return {name: value}
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, type | types.ModuleType):
        return {}
    return {f"{name}.{k}": v for k, v in attributes.items() if is_object(v)}


def _inside(framework: Framework, x: Any) -> set[int]:
    """The ids of an object and of all that it holds."""
    return {id(part) for _, part in framework.parts(x)} if framework.owns(x) else set()


def _in_frames_of(
    framework: Framework, traceback: types.TracebackType | None
) -> set[int]:
    """The ids of the local variables of a framework's frames in a traceback."""
    module = sys.modules[str(framework.module).partition(".")[0]]
    folder = str(pathlib.Path(str(module.__file__)).parent)
    found: set[int] = set()
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_filename.startswith(folder):
            found |= set(map(id, frame.f_locals.values()))
        traceback = traceback.tb_next
    return found
