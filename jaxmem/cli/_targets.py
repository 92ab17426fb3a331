"""`jaxmem targets`."""

import dataclasses
from enum import StrEnum
from typing import Annotated, Any

import typer

from jaxmem.cli._options import Json
from jaxmem.cli._output import show


class Which(StrEnum):
    """Which compilers are installed or removed."""

    all = "all"
    gpu = "gpu"
    tpu = "tpu"
    old = "old"


def targets(
    which: Annotated[
        Which,
        typer.Argument(
            help="Compilers for GPUs, for TPUs, or for both; `old` are those of other "
            "versions of jax."
        ),
    ] = Which.all,
    install: Annotated[
        bool, typer.Option("--install", help="Install missing compilers.")
    ] = False,
    list_them: Annotated[
        bool,
        typer.Option("--list", help="List the installed compilers and their sizes."),
    ] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove installed compilers.")
    ] = False,
    json_path: Json = None,
) -> None:
    """List the known chips, their memory, and which compiler is installed for each.

    `jaxmem targets --install` downloads the compilers for the installed version of jax,
    1.5 GB on disk, into a folder that only jaxmem's own processes use: with jax's
    plugins in the environment itself, every program that imports jax would print
    messages about absent devices. Matching wheels in the environment are used first.
    The folder is `JAXMEM_TARGETS_DIR`, or `jaxmem/targets` in the user's data folder.

    Exits 0, 2 on a usage error, 3 if something could not be installed or removed.
    """
    if install + list_them + remove > 1:
        raise typer.BadParameter("one of --install, --list and --remove")
    if which != Which.all and not (install or remove):
        raise typer.BadParameter(f"{which.value}: needs --install or --remove")
    if remove and json_path is not None:
        raise typer.BadParameter("--json: --remove has no result to write")
    if install and which == Which.old:
        raise typer.BadParameter("old: there is nothing old to install")
    if install:
        _install(which.value)
    elif remove:
        _remove(which)
    elif list_them:
        _list(json_path)
        return
    if not remove:
        _show_table(json_path)


def _install(kind: str) -> None:
    from jaxmem._progress import spinner
    from jaxmem.chips import install_compilers

    with spinner(True, "installing compilers") as tell:
        lines = []

        def say(text: str) -> None:
            lines.append(text)
            # the installer's own lines are many, and are shown one at a time
            tell(text) if "Downloading" in text else typer.echo(text, err=True)

        install_compilers(kind, say)


def _remove(which: Which) -> None:
    from jaxmem._bytes import format_bytes
    from jaxmem.chips import installed_folders, remove_folder
    from jaxmem.cli._app import Failed

    for folder in list(installed_folders()):
        chosen = (
            which in (Which.all, folder.kind) if folder.used else which == Which.old
        )
        if not chosen:
            continue
        try:
            remove_folder(folder)
        except OSError as error:
            raise Failed(f"{folder.path} could not be removed: {error}") from error
        typer.echo(f"removed {format_bytes(folder.bytes)}: {folder.path}", err=True)


def _list(json_path: Any) -> None:
    from jaxmem._bytes import format_bytes
    from jaxmem.chips import installed_folders

    folders = list(installed_folders())
    if json_path is not None:
        rows = [dataclasses.asdict(f) | {"path": str(f.path)} for f in folders]
        show(rows, json_path)
        return
    for f in folders:
        packages = ", ".join(f"{name} {v}" for name, v in sorted(f.packages.items()))
        state = "in use" if f.used else "not used"
        size = format_bytes(f.bytes)
        typer.echo(f"{f.kind} of jax {f.jax_version}, {state}, {size}: {f.path}")
        typer.echo(f"  {packages}")
    if not folders:
        typer.echo("nothing is installed")


def _show_table(json_path: Any) -> None:
    import jaxmem

    rows = jaxmem.targets()
    if json_path is not None:
        show([dataclasses.asdict(row) for row in rows], json_path)
    else:
        show(rows)
