"""`jaxmem check`."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from jaxmem.cli import _options as opt
from jaxmem.cli._app import DOES_NOT_FIT
from jaxmem.cli._functions import find, load, returns_the_step
from jaxmem.cli._output import show
from jaxmem.cli._written import to_write

Step = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:STEP",
        help="The function to check. MODULE can be imported from the current "
        "folder, or is a path to a `.py` file. STEP takes no arguments and "
        "returns `(step, args)` or `(step, args, options)`, or is the step itself.",
        show_default=False,
    ),
]
Reference = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:REFERENCE",
        help="The reference, with the same arguments and results; or a function "
        "that returns it with arguments, which are ignored.",
        show_default=False,
    ),
]
Script = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="If a result differs, write a Python file that reproduces it.",
        callback=to_write(".py"),
    ),
]


def check(
    step: Step,
    reference: Reference,
    arguments: opt.Arguments = None,
    batch: opt.Batch = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of consecutive steps.")] = 3,
    static: opt.Static = None,
    script: Script = None,
    json_path: opt.Json = None,
    html_path: opt.Html = None,
) -> None:
    """Run a step and its reference on this device, and compare all results.

    Tolerances are measured from the effect of rounding on the reference. Arguments that
    are shapes are drawn at random: small normal floats, and zeros. Exits 0, or 1 if a
    result differs, 2 on a usage error, 3 if a step cannot be imported or run.
    """
    import jaxmem
    from jaxmem.checking import drawn

    found, args = opt.named(step, arguments, batch, static=static)
    right = _reference(reference, batch)
    more = {k: v for k, v in found.options.items() if k not in _OF_COMPILES}
    how = {"steps": steps, "script": script, **drawn(more)}
    report = jaxmem.check(found.fn, right, *drawn(args), **how)
    show(report, json_path, html=html_path)
    if not report.passed:
        raise typer.Exit(DOES_NOT_FIT)


# settings that a step may bring along, of what compiles it for a chip
_OF_COMPILES = frozenset(
    "cache compiler_options donate_argnames donate_argnums full target timeout".split()
)


def _reference(spec: str, batch: int | None) -> Callable:
    """The function that is named, or the one that it returns with arguments."""
    function = find(spec)[1]
    if not callable(function):
        raise typer.BadParameter(f"{spec} is {type(function).__name__}, no function")
    if returns_the_step(function):
        has_batch = "batch" in inspect.signature(function).parameters
        return load(spec, None, batch if has_batch else None).fn
    return function
