"""Files and folders that a command writes: refused before any work, if at all."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import typer

from jaxmem.cli._app import Failed

STDOUT = Path("-")
PICTURES = ".png", ".svg", ".pdf"


def to_write(*suffixes: str) -> Callable[..., Path | None]:
    """A callback for an option that names a file, which has one of the suffixes."""

    def check(param: typer.CallbackParam, path: Path | None) -> Path | None:
        if path is None or (path == STDOUT and not suffixes):
            return path
        if suffixes and path.suffix.lower() not in suffixes:
            allowed = " or ".join(
                filter(None, [", ".join(suffixes[:-1]), suffixes[-1]])
            )
            raise typer.BadParameter(f"{path} does not end in {allowed}")
        if suffixes == PICTURES and importlib.util.find_spec("matplotlib") is None:
            from jaxmem._remedies import missing_package

            raise Failed(str(missing_package("drawing", "matplotlib>=3.9")))
        _check(param, path, path.parent, os.path.isdir)
        return path

    return check


def folder_to_write(param: typer.CallbackParam, path: Path) -> Path:
    """A callback for an option that names a folder, which may not exist yet."""
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    _check(param, path, there, lambda p: p.exists() and not p.is_dir())
    return path


def _check(
    param: typer.CallbackParam,
    path: Path,
    folder: Path,  # in which it is, or will be
    other: Callable[[Path], bool],  # whether something of another kind has the name
) -> None:
    if other(path):
        why = "is a folder" if path.is_dir() else "is no folder"
    elif not folder.is_dir():
        why = f"cannot be written: there is no folder {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = "cannot be written"
    else:
        return
    raise Failed(f"{param.opts[0]}: {path} {why}")
