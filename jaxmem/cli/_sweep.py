"""`jaxmem sweep`."""

import ast
from typing import Annotated, Any, cast

import typer

from jaxmem.cli import _options as opt
from jaxmem.cli._functions import find
from jaxmem.cli._output import does_not_fit, show


def sweep(
    function: opt.Function,
    over: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=VALUE,...",
            help="A parameter of FUNCTION, and the values to try; can be repeated.",
        ),
    ],
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHIP",
            help="Chip to compile for; can be repeated. See `jaxmem targets`.",
        ),
    ] = None,
    timeout: opt.Timeout = None,
    json_path: opt.Json = None,
    html_path: opt.Html = None,
    plot_path: opt.Plot = None,
) -> None:
    """Estimate a step over depth, width, batch and chip, as a table and a picture.

    FUNCTION has the parameters that `--over` names, and returns `(step, args)` or
    `(step, args, options)`. With this in `train.py`:

        def sized(layers, batch):
            params = jax.eval_shape(functools.partial(init, layers), jax.random.key(0))
            tokens = jax.ShapeDtypeStruct((batch, 512), "int32")
            return train_step, (params, tokens), {"donate_argnums": (0,)}

    the command is
    `jaxmem sweep train:sized --over layers=2,4,8 --over batch=8,16 --target h100`.

    Exits 0 where any of the steps fits its chip, 1 where none does, 2 on a usage error,
    3 where a step cannot be imported, traced or compiled.
    """
    import jaxmem

    values = dict(map(_values, over))
    if len(values) < len(over):
        raise typer.BadParameter("--over: a name is given twice")
    for chip in target or [None]:
        opt.check_target(chip)
    _, make = find(function)
    if not callable(make):
        raise typer.BadParameter(f"{function} is {type(make).__name__}, no function")
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    try:
        found = jaxmem.sweep(cast(Any, make), values, target or None, **options)
    except ValueError as error:
        if not str(error).startswith("over"):
            raise
        raise typer.BadParameter(f"--over: {error}") from error
    show(found, json_path, plot_path, html=html_path)
    if all(step.fits is False for step in found.steps):
        does_not_fit("none of the steps")


def _values(text: str) -> tuple[str, list[Any]]:
    """A name with its values; what is no number or other literal is a text."""
    name, equals, values = text.partition("=")
    if not (equals and name.isidentifier() and values):
        raise typer.BadParameter(f"--over {text!r}: expected NAME=VALUE,VALUE")
    return name, [_literal(word) for word in values.split(",")]


def _literal(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word
