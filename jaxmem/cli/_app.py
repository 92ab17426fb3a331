"""The application: exit codes, errors in one line, what all commands have in common."""

import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jaxmem._contexts import set_within

DOES_NOT_FIT, WRONG_USE, FAILED, INTERRUPTED = 1, 2, 3, 130
# What each exit code means: `docs/commands.py` writes it into the page, and the tests
# walk it with every command.
EXIT_CODES = {
    0: "it fits, or there is nothing to check",
    DOES_NOT_FIT: "it does not fit: a limit, a budget, the memory of the chip; for "
    "`lint`, a finding is as severe as `--fail-on`; for `audit`, there is a finding; "
    "for `check`, a result differs; for `diff`, a limit is exceeded; for `explain`, "
    "the log has no such error",
    WRONG_USE: "usage error: an unknown option, chip or name, or a value "
    "that is not allowed",
    FAILED: "something could not be imported, traced, compiled, installed or written",
    INTERRUPTED: "interrupted (Ctrl-C)",
}
_MOST = 800  # characters of an error that is shown in one line
# Click's class, which typer brings under one name or another.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

Traceback = Annotated[
    bool,
    typer.Option(
        "--traceback",
        envvar="JAXMEM_TRACEBACK",
        help="Print the traceback of an error.",
    ),
]


class Failed(Exception):
    """What could not be done, in words that need no further explanation: exit 3."""


class UntilClosed:
    """A stream that drops what is written once its reader has gone, as `head` does.

    The command goes on: its exit code and the files that it writes are those of the
    result.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._tried(lambda: self._stream.write(text)) or 0

    def flush(self) -> None:
        self._tried(self._stream.flush)

    def _tried(self, write: Callable[[], Any]) -> Any:
        try:
            return write()
        except BrokenPipeError:
            # what is in the buffer still has to go somewhere
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class _Commands(TyperGroup):
    """Commands whose wrong use is told in one line."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except typer.Abort:
            typer.echo("jaxmem: interrupted", err=True)
            sys.exit(INTERRUPTED)
        except Failed as error:  # of an option, before the command has begun
            typer.echo(f"jaxmem: {one_line(str(error))}", err=True)
            sys.exit(FAILED)
        except _UsageError as error:
            context = getattr(error, "ctx", None)
            path = context.command_path if context else "jaxmem"
            message = getattr(error, "format_message", error.__str__)()
            line = f"{path}: {one_line(message).rstrip('.')} (see {path} --help)"
            typer.echo(line, err=True)
            sys.exit(WRONG_USE)
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    name="jaxmem",
    cls=_Commands,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the console script."""
    sys.stdout, sys.stderr = UntilClosed(sys.stdout), UntilClosed(sys.stderr)
    app()


def _version(wanted: bool) -> None:
    if wanted:
        import jaxmem

        typer.echo(f"jaxmem {jaxmem.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def jaxmem_command(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Training in JAX that fits in less memory.

    Exits 0 if the step fits, 1 if it does not, 2 on a usage error, and 3 if
    something could not be imported, traced, compiled, installed or written.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(WRONG_USE)


def register(function: Callable[..., None], name: str) -> None:
    """Makes a function a command, with the option `--traceback`."""

    @functools.wraps(function)
    def command(*args: Any, traceback: bool = False, **kwargs: Any) -> None:
        from jaxmem._progress import PLAIN_LINES

        with set_within(PLAIN_LINES, True), _in_one_line(traceback):
            function(*args, **kwargs)

    signature = inspect.signature(function)
    kind = inspect.Parameter.KEYWORD_ONLY
    option = inspect.Parameter("traceback", kind, default=False, annotation=Traceback)
    parameters = [*signature.parameters.values(), option]
    command.__dict__["__signature__"] = signature.replace(parameters=parameters)
    command.__annotations__ = {**function.__annotations__, "traceback": Traceback}
    app.command(name)(command)


@contextmanager
def _in_one_line(show: bool) -> Iterator[None]:
    """Turns errors into a line on stderr and an exit code."""
    try:
        yield
    except (typer.Exit, typer.Abort, _UsageError):
        raise
    except Exception as error:
        if show:
            traceback.print_exc()
        typer.echo(f"jaxmem: {_described(error)}", err=True)
        raise typer.Exit(FAILED) from error


def _described(error: Exception) -> str:
    from jaxmem.chips import InstallError

    text = one_line(str(error))
    if isinstance(error, Failed | InstallError):
        return text
    return f"the step failed: {type(error).__name__}: {text}"


def one_line(text: str) -> str:
    """A text without line breaks, cut where it is very long."""
    line = " ".join(text.split())
    if len(line) <= _MOST:
        return line
    return f"{line[:_MOST]} ... (--traceback shows all)"


def is_interactive() -> bool:
    """Whether there is someone to ask."""
    return sys.stdin.isatty() and sys.stderr.isatty() and not os.environ.get("CI")
