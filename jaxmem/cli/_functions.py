"""A function of the user's and its arguments, by their names: MODULE:FUNCTION.

The function either takes no arguments and returns the step with its arguments, or is
the step itself, whose arguments another function makes.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

from jaxmem.cli._app import Failed, one_line

BESIDE = "args"  # the function that makes a step's arguments, where none is named
_BATCH = "batch"  # a parameter of such functions
_RETURNS = (
    "(step, args) or (step, args, options) with args a tuple and options a dict; if it "
    "is the step itself, name the function that makes its arguments by --args"
)


@dataclass
class Named:
    """A function with its arguments.

    Attributes:
      fn: the step.
      make_args: from a batch size, or None, to the step's positional arguments.
      options: settings such as `target`, and keyword arguments of the step.
    """

    fn: Any
    make_args: Callable[[int | None], tuple]
    options: dict[str, Any] = field(default_factory=dict)


def load(spec: str, args_spec: str | None, batch: int | None) -> Named:
    """The step that is named.

    Args:
      spec: MODULE:FUNCTION or path.py:function.
      args_spec: the function that makes the arguments, [MODULE:]FUNCTION.
      batch: the batch size to make the first arguments for.

    Raises:
      typer.BadParameter: there is no such module or function, or it returns something
        else than a step with its arguments.
      Failed: the module or the function raises an error.
    """
    module, function = find(spec)
    if args_spec is None and returns_the_step(function):
        return _from_returned(function, spec, batch)
    if not callable(function):
        raise typer.BadParameter(f"{spec} is {type(function).__name__}, no function")
    maker, title = find_args(module, spec, args_spec)
    return Named(function, lambda size: _arguments(maker, title, size))


def find(spec: str) -> tuple[ModuleType, Any]:
    """The module and the object of MODULE:NAME; the name may have dots."""
    module_name, colon, name = spec.rpartition(":")
    if not (colon and module_name and name):
        raise typer.BadParameter(f"expected MODULE:FUNCTION, got {spec!r}")
    module = _load_module(module_name)
    try:
        return module, reduce(getattr, name.split("."), module)
    except AttributeError:
        message = f"{module_name!r} has no function {name!r}"
        raise typer.BadParameter(message) from None


def find_args(
    module: ModuleType, spec: str, args_spec: str | None
) -> tuple[Callable, str]:
    """The function that makes arguments, and its name."""
    if args_spec is not None:
        title = (
            args_spec if ":" in args_spec else f"{spec.rpartition(':')[0]}:{args_spec}"
        )
        maker = find(title)[1]
    else:
        title, maker = (
            f"{spec.rpartition(':')[0]}:{BESIDE}",
            getattr(module, BESIDE, None),
        )
        if maker is None:
            raise typer.BadParameter(
                f"{spec} takes arguments: write a function {BESIDE}() beside it that "
                "returns a tuple of them, or name one by --args MODULE:FUNCTION"
            )
    if not callable(maker):
        raise typer.BadParameter(f"{title} is {type(maker).__name__}, no function")
    return maker, title


def returns_the_step(function: Any) -> bool:
    """Whether a function can be called as it is, or with a batch size alone."""
    return _needed(function) in ([], [_BATCH])


def _needed(function: Any) -> list[str] | None:
    """Names of the parameters without a default; None where that is not known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    empty = inspect.Parameter.empty
    return [p.name for p in parameters if p.default is empty and p.kind not in several]


def call(function: Callable, title: str, batch: int | None) -> Any:
    """What a function of the user's returns, given a batch size if it takes one."""
    parameters = inspect.signature(function).parameters
    if _BATCH in parameters:
        if batch is None and parameters[_BATCH].default is inspect.Parameter.empty:
            raise typer.BadParameter(f"{title} takes a batch size: give --batch")
        given = {} if batch is None else {_BATCH: batch}
    elif batch is not None:
        raise typer.BadParameter(
            f"--batch: {title} has no parameter named {_BATCH!r} to give it to"
        )
    else:
        given = {}
    if needed := [name for name in _needed(function) or () if name not in given]:
        raise typer.BadParameter(
            f"{title} must take no arguments other than {_BATCH!r}, and needs "
            f"{', '.join(needed)}"
        )
    try:
        return function(**given)
    except Exception as error:
        raise Failed(f"{title} failed: {type(error).__name__}: {error}") from error


def _from_returned(function: Callable, spec: str, batch: int | None) -> Named:
    def returned(size: int | None) -> tuple[Any, tuple, dict[str, Any]]:
        match call(function, spec, size):
            case (step, tuple(args)) if callable(step):
                return step, args, {}
            case (step, tuple(args), dict(options)) if callable(step):
                return step, args, options
            case other:
                found = type(other).__name__
                raise typer.BadParameter(f"{spec} returned {found}, not {_RETURNS}")

    step, args, options = returned(batch)
    return Named(
        step,
        lambda size: args if size == batch else returned(size)[1],
        dict(options),
    )


def _arguments(maker: Callable, title: str, batch: int | None) -> tuple:
    args = call(maker, title, batch)
    if type(args) is not tuple:
        raise typer.BadParameter(
            f"{title} must return a tuple of arguments, got {type(args).__name__}"
        )
    return args


def _load_module(name: str) -> ModuleType:
    try:
        if name.endswith(".py"):
            return _load_file(Path(name))
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(name)
    except typer.BadParameter:
        raise
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            message = f"no module {name!r} in {Path.cwd()}"
            raise typer.BadParameter(message) from error
        raise Failed(f"importing {name} failed: {error}") from error
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {one_line(str(error))}"
        raise Failed(f"importing {name} failed: {text}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise typer.BadParameter(f"no file {str(path)!r}")
    known = sys.modules.get(path.stem)
    if known and Path(getattr(known, "__file__", None) or "") == path.resolve():
        return known  # the step's module, whose arguments are in the same file
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
