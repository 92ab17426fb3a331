"""`jaxmem diff`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from jaxmem.cli import _options as opt
from jaxmem.cli._app import DOES_NOT_FIT, Failed, one_line
from jaxmem.cli._output import does_not_fit, show
from jaxmem.cli._written import to_write

if TYPE_CHECKING:
    from jaxmem.diffing import Side
    from jaxmem.memory import MemoryReport

_WHAT = (
    "MODULE:FUNCTION as for `jaxmem estimate`, or the path of a report that its "
    "`--json` wrote."
)


def _percent(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        share = float(value.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise typer.BadParameter(f"{value!r} is no percentage, such as 2%")
    return share


def _commit(of: str) -> Any:
    return typer.Option(metavar="COMMIT", help=f"Take {of} from this commit.")


def _python(of: str) -> Any:
    return typer.Option(
        metavar="PATH",
        help=f"Trace and compile {of} with this Python, which has jaxmem installed.",
    )


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_WHAT, show_default=False)],
    b: Annotated[
        str | None,
        typer.Argument(
            metavar="[B]",
            help="The same, after the change; by default A, for two commits or "
            "two Pythons.",
            show_default=False,
        ),
    ] = None,
    arguments: opt.Arguments = None,
    batch: opt.Batch = None,
    target: opt.Chip = None,
    donate: opt.Donate = None,
    static: opt.Static = None,
    timeout: opt.Timeout = None,
    commit_a: Annotated[str | None, _commit("A")] = None,
    commit_b: Annotated[str | None, _commit("B")] = None,
    python_a: Annotated[str | None, _python("A")] = None,
    python_b: Annotated[str | None, _python("B")] = None,
    reduce: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the smallest program of plain JAX that still shows half of the "
            "growth of temporaries, to a file that ends in .py.",
            callback=to_write(".py"),
        ),
    ] = None,
    reduce_seconds: Annotated[
        float,
        typer.Option(
            min=0.001,
            help="Seconds after which the smallest program so far is taken.",
            callback=opt.seconds,
        ),
    ] = 600.0,
    maximum: Annotated[
        str | None,
        typer.Option("--max", metavar="SIZE", help="Limit for the peak of B."),
    ] = None,
    max_ms: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Limit for the predicted milliseconds of B.",
            callback=opt.seconds,
        ),
    ] = None,
    max_growth: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Limit for the growth of peak and predicted time, such as 2%.",
        ),
    ] = None,
    json_path: opt.Json = None,
    html_path: opt.Html = None,
    plot_path: opt.Plot = None,
) -> None:
    """Compare two steps: bytes and predicted ms by module, and what was compiled.

    `jaxmem diff train:plain train:scheduled --target h100` compares two steps,
    `jaxmem diff train:step --commit-a main` a commit with the current files, and
    `jaxmem diff train:step --python-a old/bin/python` two versions of jax. A report
    that `jaxmem estimate train:step --json base.json` wrote is a baseline: `jaxmem diff
    base.json train:step --max-growth 2%`.

    Exits 0, or 1 if B is above a limit, 2 on a usage error, 3 if a step cannot be
    imported, traced, compiled or reduced.
    """
    from jaxmem._progress import spinner
    from jaxmem.diffing import compare_sides, exceeded
    from jaxmem.memory import DoesNotFit

    limit, growth = opt.size(maximum, "--max"), _percent(max_growth)
    places = (commit_a, python_a), (commit_b, python_b)
    if b is None and places[0] == places[1]:
        raise typer.BadParameter("B: give a second step, or --commit-a or --python-a")
    flags = {"donate": donate, "static": static, "timeout": timeout}
    flags |= {"args_spec": arguments, "batch": batch}
    second = a if b is None else b
    with _side("a", a, *places[0], {**flags, "target": target}) as before:
        chip = target or (before.report()().target if a.endswith(".json") else None)
        with _side("b", second, *places[1], {**flags, "target": chip}) as after:
            same = a == second and commit_a == commit_b
            try:
                with spinner(True, "compiling both"):
                    found = compare_sides(before, after, same, reduce, reduce_seconds)
                limits = {"max_bytes": limit, "max_ms": max_ms, "max_growth": growth}
                one, two = cast("tuple[MemoryReport, MemoryReport]", found.reports)
                above = exceeded(two, one, **limits)
            except DoesNotFit as error:
                does_not_fit(one_line(str(error)))
                return
            except (ValueError, RuntimeError) as error:
                raise Failed(str(error)) from error
    show(found, json_path, plot_path, html=html_path)
    for sentence in above:
        typer.echo(f"above the limit: {sentence}", err=True)
    if above:
        raise typer.Exit(DOES_NOT_FIT)


@contextmanager
def _side(
    name: str, spec: str, commit: str | None, python: str | None, flags: dict[str, Any]
) -> Iterator["Side"]:
    """A saved report, a step of this process, or one of another."""
    from jaxmem.diffing import StepHere, elsewhere, saved

    try:
        if spec.endswith(".json"):
            if commit or python:
                given = "commit" if commit else "python"
                raise typer.BadParameter(f"--{given}-{name}: {spec} is a saved report")
            side = saved(name.upper(), Path(spec))
        elif commit is None and python is None:
            how = dict(flags)
            found, args = opt.named(spec, how.pop("args_spec"), how.pop("batch"), **how)
            side = StepHere(found.fn, args, found.options)
        else:
            opt.check_target(flags["target"], to_compile=False)
            with elsewhere(name, spec, commit, python, flags) as side:
                yield side
            return
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except RuntimeError as error:
        raise Failed(str(error)) from error
    yield side
