"""Options that several commands share."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxmem.cli._app import Failed, is_interactive
from jaxmem.cli._functions import Named, load
from jaxmem.cli._written import PICTURES, to_write


def seconds(value: float | None) -> float | None:
    """A callback for an option: the seconds are a number that ends."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number of seconds")
    return value


def _chips() -> list[str]:
    """For the shell's completion."""
    from jaxmem.chips import CHIPS

    return list(CHIPS)


Function = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="MODULE can be imported from the current folder, or is a path to "
        "a `.py` file. FUNCTION takes no arguments and returns `(step, args)` or "
        "`(step, args, options)`, or is the step itself.",
        show_default=False,
    ),
]
Arguments = Annotated[
    str | None,
    typer.Option(
        "--args",
        metavar="[MODULE:]FUNCTION",
        help="The function that returns the arguments, a tuple, if FUNCTION is the "
        "step itself.  [default: the function `args` beside it]",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Limit for the peak, such as 14GiB."),
]
Batch = Annotated[
    int | None,
    typer.Option(min=1, help="Batch size, for a function with a parameter `batch`."),
]
Chip = Annotated[
    str | None,
    typer.Option(
        metavar="CHIP",
        help="Chip to compile for. See `jaxmem targets`.",
        autocompletion=_chips,
    ),
]
Donate = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ARGUMENT",
        help="Number or name of a donated argument; can be repeated.",
    ),
]
Static = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ARGUMENT",
        help="Number or name of an argument that is a plain Python value; can be "
        "repeated.",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="Limit for a compile, in seconds.  [default: 600]",
        callback=seconds,
    ),
]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the result as JSON; `-` writes it to standard output, and nothing "
        "else.",
        callback=to_write(),
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="Write an HTML page, to a file that ends in .html.",
        callback=to_write(".html"),
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Write a plot (.png, .svg, .pdf).",
        callback=to_write(*PICTURES),
    ),
]


def without_those_of_estimates(options: dict) -> dict:
    """The options that a step brings along, for what is no `jaxmem.estimate`."""
    of_estimates = ("compiler_options", "cache", "full")
    return {k: v for k, v in options.items() if k not in of_estimates}


def named(
    spec: str,
    args_spec: str | None,
    batch: int | None,
    *,
    target: str | None = None,
    donate: list[str] | None = None,
    static: list[str] | None = None,
    timeout: float | None = None,
) -> tuple[Named, tuple]:
    """The function with its arguments; flags replace what it brings along."""
    check_target(target)
    found = load(spec, args_spec, batch)
    args = found.make_args(batch)
    for kind, given in (("donate", donate), ("static", static)):
        if given:
            found.options.pop(f"{kind}_argnums", None)
            found.options.pop(f"{kind}_argnames", None)
            found.options |= _places(kind, given, len(args))
    _check_places(found, args, donate, static)
    if target is not None:
        found.options["target"] = target
    if timeout is not None:
        found.options["timeout"] = timeout
    check_target(found.options.get("target"))
    return found, args


def _places(kind: str, given: list[str], count: int) -> dict[str, Any]:
    """Numbers and names of arguments, as `jax.jit` takes them."""
    numbers = tuple(int(word) for word in given if word.isdecimal())
    for number in numbers:
        if number >= count:
            raise typer.BadParameter(
                f"--{kind} {number}: there are {count} arguments, and the first is 0"
            )
    names = tuple(word for word in given if not word.isdecimal())
    places = {f"{kind}_argnums": numbers, f"{kind}_argnames": names}
    return {key: value for key, value in places.items() if value}


def _check_places(
    found: Named, args: tuple, donate: list[str] | None, static: list[str] | None
) -> None:
    """A name that no argument has is wrong use, and an argument that is both."""
    from jaxmem.frameworks import donated_and_static

    number = lambda word: int(word) if word.isdecimal() else word
    places = [tuple(map(number, given or ())) for given in (donate, static)]
    try:
        donated_and_static(found.fn, args, found.options, *places)
    except ValueError as error:
        raise typer.BadParameter(f"--donate, --static: {error}") from error


def check_target(name: Any, to_compile: bool = True) -> None:
    """An unknown chip is wrong use; one without a compiler is a failure, or is asked.

    In a terminal the compiler is installed if the user wants it. A chip that nothing is
    compiled for needs none.
    """
    from jaxmem.chips import InstallError, get_target, install_compilers

    try:
        target = get_target(name, check=False)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if target.available or not to_compile:
        return
    if is_interactive():
        typer.echo(f"cannot compile for {target.name} here: {target.why_not}", err=True)
        if typer.confirm("Install it now?", err=True):
            kind = "gpu" if target.platform == "cuda" else target.platform
            install_compilers(kind, lambda text: typer.echo(text, err=True))
            return
    try:
        get_target(name)
    except (RuntimeError, InstallError) as error:
        raise Failed(str(error)) from error


def size(text: str | None, option: str) -> int | None:
    """Bytes of a text such as "14GiB"."""
    from jaxmem._bytes import parse_bytes

    try:
        return None if text is None else parse_bytes(text, option)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def budget_of(text: str | None, option: str = "--budget") -> int | None:
    """Bytes of a `--budget`, or of another option."""
    if (room := size(text, option)) == 0:
        raise typer.BadParameter(f"{option} 0: more than 0 bytes")
    return room
