"""What commands print and write."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Protocol

import typer

from jaxmem.cli._app import DOES_NOT_FIT, Failed
from jaxmem.cli._written import STDOUT

_DOES_NOT_FIT = "does not fit"


class Drawn(Protocol):
    """A result that draws itself."""

    def plot(self, path: Path, /) -> None: ...


def show(
    result: Any,
    json_path: Path | None = None,
    plot: Path | None = None,
    html: Path | None = None,
    details: Any = None,
) -> None:
    """Prints a result and details of it; writes JSON, a picture, a page where asked."""
    if json_path != STDOUT:
        _print(result)
        if details is not None:
            print(f"\n{details}")
    if json_path is not None:
        write_json(result, json_path)
    if plot is not None:
        draw(result, plot)
    if html is not None:
        try:
            result.save(html)
        except OSError as error:
            raise Failed(f"--html: {error}") from error


def _print(result: Any) -> None:
    from rich.console import Console

    if "__str__" in vars(type(result)) and not sys.stdout.isatty():
        print(result)  # in a pipe or a file: lines of their full length
    else:
        Console().print(result)


def write_json(result: Any, path: Path) -> None:
    """Writes a result's fields, or prints them where the path is `-`."""
    text = as_json(result)
    if path == STDOUT:
        print(text)
    else:
        try:
            path.write_text(text + "\n")
        except OSError as error:
            raise Failed(f"--json: {error}") from error


def as_json(result: Any) -> str:
    """The JSON of a report, or of a dataclass with its properties."""
    if hasattr(result, "to_json"):
        return result.to_json(indent=2)
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        kind = type(result)
        names = [n for n in dir(kind) if isinstance(getattr(kind, n), property)]
        own = {name: getattr(result, name) for name in names}
        return json.dumps(dataclasses.asdict(result) | own, indent=2)
    return json.dumps(result, indent=2)


def draw(result: Drawn, path: Path) -> None:
    """Draws a result; says why where that is not possible."""
    try:
        result.plot(path)
    except (ValueError, ImportError, OSError) as error:
        raise Failed(f"no picture: {error}") from error


def check_limit(
    what: str, found: int, limit: int | None, json_path: Path | None, option: str = ""
) -> None:
    """Says whether bytes are within a limit, and exits with 1 where they are not.

    `option`: the one that gave it. The chip's memory, of which the report tells in
    words of its own, has none.
    """
    if limit is None:
        return
    from jaxmem._bytes import format_bytes

    sizes = f"{what} takes {format_bytes(found)} of {format_bytes(limit)}"
    difference = format_bytes(abs(found - limit))
    if found > limit:
        beyond = f"more than {option}" if option else _DOES_NOT_FIT
        _exit_1(f"{beyond}: {sizes}, {difference} too much")
    within = f"within {option}" if option else "fits"
    typer.echo(f"{within}: {sizes}, {difference} to spare", err=json_path == STDOUT)


def does_not_fit(why: str) -> None:
    """Says why on stderr, and exits with 1."""
    _exit_1(f"{_DOES_NOT_FIT}: {why}")


def _exit_1(said: str) -> None:
    typer.echo(said, err=True)
    raise typer.Exit(DOES_NOT_FIT)
