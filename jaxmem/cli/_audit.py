"""`jaxmem audit`."""

import typer

from jaxmem.cli import _options as opt
from jaxmem.cli._app import DOES_NOT_FIT
from jaxmem.cli._output import show


def audit(
    function: opt.Function,
    arguments: opt.Arguments = None,
    batch: opt.Batch = None,
    target: opt.Chip = None,
    donate: opt.Donate = None,
    static: opt.Static = None,
    timeout: opt.Timeout = None,
    json_path: opt.Json = None,
    html_path: opt.Html = None,
) -> None:
    """Check the compiled step: no value is overwritten while it is still needed.

    Exits 0, or 1 if there is a finding, 2 on a usage error, 3 if the step cannot be
    imported, traced or compiled.
    """
    import jaxmem

    how = {"target": target, "donate": donate, "static": static, "timeout": timeout}
    found, args = opt.named(function, arguments, batch, **how)
    options = opt.without_those_of_estimates(found.options)
    report = jaxmem.audit(found.fn, *args, **options)
    show(report, json_path, html=html_path)
    if report.findings:
        raise typer.Exit(DOES_NOT_FIT)
