"""`jaxmem audit`."""

import typer

from jaxmem.cli._app import DOES_NOT_FIT
from jaxmem.cli._options import (
    Arguments,
    Batch,
    Chip,
    Donate,
    Function,
    Html,
    Json,
    Static,
    Timeout,
    named,
    without_those_of_estimates,
)
from jaxmem.cli._output import show


def audit(
    function: Function,
    arguments: Arguments = None,
    batch: Batch = None,
    target: Chip = None,
    donate: Donate = None,
    static: Static = None,
    timeout: Timeout = None,
    json_path: Json = None,
    html_path: Html = None,
) -> None:
    """Check the compiled step: no value is overwritten while it is still needed.

    Exits 0, or 1 if there is a finding, 2 on a usage error, 3 if the step cannot be
    imported, traced or compiled.
    """
    import jaxmem

    how = {"target": target, "donate": donate, "static": static, "timeout": timeout}
    found, args = named(function, arguments, batch, **how)
    options = without_those_of_estimates(found.options)
    report = jaxmem.audit(found.fn, *args, **options)
    show(report, json_path, html=html_path)
    if report.findings:
        raise typer.Exit(DOES_NOT_FIT)
