"""`jaxmem residuals`."""

from typing import Annotated

import typer

from jaxmem.cli import _options as opt
from jaxmem.cli._output import check_limit, show

# of a step's options those that change nothing about what the backward pass keeps
_OF_COMPILES = (
    "donate_argnums donate_argnames target timeout compiler_options cache full"
)


def residuals(
    function: opt.Function,
    arguments: opt.Arguments = None,
    batch: opt.Batch = None,
    argnums: Annotated[
        list[int] | None,
        typer.Option(
            "--argnums",
            min=0,
            help="Number of an argument to differentiate; can be repeated.  "
            "[default: all]",
        ),
    ] = None,
    maximum: Annotated[
        str | None,
        typer.Option(
            "--max",
            metavar="SIZE",
            help="Limit for the bytes of the residuals, such as 2GiB.",
        ),
    ] = None,
    json_path: opt.Json = None,
    html_path: opt.Html = None,
) -> None:
    """List the residuals of a loss, without compiling it.

    The function must be differentiable, a loss or a part of a model, not a step that
    takes the gradient itself. For example `jaxmem residuals train:loss --argnums 0`.

    Exits 0, or 1 if the residuals take more than `--max`, 2 on a usage error, 3 if the
    function cannot be imported or traced.
    """
    import jaxmem

    limit = opt.size(maximum, "--max")
    found, args = opt.named(function, arguments, batch)
    options = {k: v for k, v in found.options.items() if k not in _OF_COMPILES.split()}
    if argnums:
        if max(argnums) >= len(args):
            raise typer.BadParameter(
                f"--argnums {max(argnums)}: there are {len(args)} arguments, and the "
                "first is 0"
            )
        options["argnums"] = tuple(argnums)
    kept = jaxmem.residuals(found.fn, *args, **options)
    show(kept, json_path, html=html_path)
    check_limit("what is kept", kept.total_bytes, limit, json_path, "--max")
