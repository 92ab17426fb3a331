"""`jaxmem lint`."""

from enum import StrEnum
from typing import Annotated

import typer

from jaxmem.cli import _options as opt
from jaxmem.cli._app import DOES_NOT_FIT
from jaxmem.cli._output import show


class FailOn(StrEnum):
    """The least severity of findings that the exit code tells."""

    error = "error"
    warning = "warning"
    note = "note"
    never = "never"


def lint(
    function: opt.Function,
    arguments: opt.Arguments = None,
    batch: opt.Batch = None,
    target: opt.Chip = None,
    fail_on: Annotated[
        FailOn, typer.Option(help="The lowest severity that exits with 1.")
    ] = FailOn.error,
    donate: opt.Donate = None,
    static: opt.Static = None,
    timeout: opt.Timeout = None,
    json_path: opt.Json = None,
    html_path: opt.Html = None,
) -> None:
    """Find what makes a step take more memory or time than it needs.

    The step is traced; with `--target` it is also compiled, and checked for problems
    that only the compiled step shows.

    Exits 0, or 1 if a finding is as severe as `--fail-on`, 2 on a usage error, 3 if the
    step cannot be imported, traced or compiled.
    """
    import jaxmem

    how = {"target": target, "donate": donate, "static": static, "timeout": timeout}
    found, args = opt.named(function, arguments, batch, **how)
    options = opt.without_those_of_estimates(found.options)
    report = jaxmem.lint(found.fn, *args, **options)
    show(report, json_path, html=html_path)
    order = list(FailOn)[: list(FailOn).index(fail_on) + 1]
    if fail_on != FailOn.never and any(f.severity in order for f in report.findings):
        raise typer.Exit(DOES_NOT_FIT)
