"""`jaxmem explain`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxmem.cli import _options as opt
from jaxmem.cli._app import DOES_NOT_FIT, Failed
from jaxmem.cli._output import show
from jaxmem.cli._written import STDOUT


def explain(
    log: Annotated[
        Path,
        typer.Argument(
            metavar="LOG",
            help="A file with the error, or - for standard input.",
            show_default=False,
        ),
    ],
    step: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="The step that was running: it is compiled, and its largest buffers "
            "are listed by module and line.",
        ),
    ] = None,
    arguments: opt.Arguments = None,
    batch: opt.Batch = None,
    target: opt.Chip = None,
    donate: opt.Donate = None,
    static: opt.Static = None,
    timeout: opt.Timeout = None,
    json_path: opt.Json = None,
    html_path: opt.Html = None,
) -> None:
    """Explain an out-of-memory error of XLA: what is large, why, and what to write.

    LOG is the output of the program: `python train.py 2>&1 | tee log`, then `jaxmem
    explain log`. It may contain other output as well, from a GPU, a TPU or the host; if
    there are several errors, the last is explained. `--target` is the chip that the
    program ran on.

    Exits 0, or 1 if the log has no such error, 2 on a usage error, 3 if the log cannot
    be read, or the step cannot be imported, traced or compiled.
    """
    import jaxmem
    from jaxmem.explaining import has_error

    text = _read(log)
    of_step = {
        "--args": arguments,
        "--batch": batch,
        "--donate": donate,
        "--static": static,
        "--timeout": timeout,
    }
    if step is None and (given := [k for k, v in of_step.items() if v is not None]):
        raise typer.BadParameter(f"{given[0]} needs a --step")
    if not has_error(text):
        typer.echo(f"{log} has no out-of-memory error", err=True)
        raise typer.Exit(DOES_NOT_FIT)
    if step is None:
        opt.check_target(target, to_compile=False)
        found = jaxmem.explain(text, target=target)
    else:
        how = {"target": target, "donate": donate, "static": static}
        running, args = opt.named(step, arguments, batch, **how, timeout=timeout)
        found = jaxmem.explain(text, running.fn, *args, **running.options)
    show(found, json_path, html=html_path)


def _read(log: Path) -> str:
    try:
        if log == STDOUT:
            return sys.stdin.read()
        return log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        raise typer.BadParameter(f"there is no file {log}") from error
    except OSError as error:
        raise Failed(f"{log} cannot be read: {error.strerror}") from error
