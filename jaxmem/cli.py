"""The `jaxmem` command, on top of the public functions."""

import importlib
import importlib.util
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

app = typer.Typer(
    name="jaxmem",
    help="Training in JAX that fits in less memory.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

DOES_NOT_FIT, FAILED = 1, 3


class Flavour(StrEnum):
    """Which Flax API the demo's model is written in."""

    nnx = "nnx"
    linen = "linen"


class StepToMeasure(NamedTuple):
    """A step with its arguments, as a user's function returns it."""

    fn: Any
    args: tuple
    options: dict[str, Any]


def main() -> None:
    """Entry point of the console script."""
    app()


@app.command()
def demo(
    model: Annotated[
        Flavour, typer.Option(help="Flax API of the model.")
    ] = Flavour.nnx,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 100,
    batch: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 8,
    dropout: Annotated[float, typer.Option(min=0.0, max=0.99)] = 0.0,
    seed: Annotated[int, typer.Option()] = 0,
    optimizer: Annotated[
        str,
        typer.Option(
            help="Of the substituted run; the plain one has adamw. adama, adamw-8bit, "
            "adamw-4bit, adama-8bit, adamw-host, galore, galore-8bit, apollo, "
            "apollo-mini, fira, came, adafactor, adalomo, lomo, sm3 or adam-mini."
        ),
    ] = "adamw",
    micro_batches: Annotated[
        int | None,
        typer.Option(
            min=1, help="Parts of a batch in both runs.  [default: 1; with adama, 8]"
        ),
    ] = None,
    technique: Annotated[
        str,
        typer.Option(
            help="Of the second run. To rounding: exact, elementwise, ms-norm, "
            "linear-cross-entropy, frozen. Approximate: bits-1, bits-2, bits-3, "
            "bits-4, regelu2, storage-8, storage-4. With --model linen also lora, "
            "wta-crs and velora."
        ),
    ] = "exact",
    target: Annotated[
        list[str] | None,
        typer.Option(help="Chip to compile for; may be given again. See `targets`."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "jaxmem-demo"
    ),
) -> None:
    """Train a small GPT plain and substituted, and print the bytes of both.

    The text is the Python standard library's own sources. Writes `demo.png` and
    `demo.json` into the folder `--out`. Ends within 3 minutes on 2 cores.

    With `--optimizer adama` the plain model trains with AdamW on gradients accumulated
    over micro-batches, the substituted one through `jaxmem.microbatch` with AdamA.

    With `--technique frozen` or `lora` both runs train a part of the parameters, the
    same one. With `inplace-abn` both have batch norms in their MLPs.
    """
    from jaxmem.demo import Settings, run

    try:
        settings = Settings(
            model=model.value,
            steps=steps,
            batch=batch,
            dropout=dropout,
            seed=seed,
            optimizer=optimizer,
            micro_batches=micro_batches,
            technique=technique,
        )
        run(settings, target, out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def estimate(
    function: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION")],
    target: Annotated[
        str | None, typer.Option(help="Chip to compile for. See `jaxmem targets`.")
    ] = None,
    maximum: Annotated[
        str | None,
        typer.Option("--max", help="Exit 1 where the peak is larger, as in 14GiB."),
    ] = None,
    donate: Annotated[
        list[int] | None,
        typer.Option(help="Number of a donated argument; may be given again."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the report as JSON.")
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw bytes over the schedule.")
    ] = None,
) -> None:
    """Print the bytes that a step takes on a chip, which need not be there.

    MODULE is a module that can be imported from the current folder, or a path to a
    `.py` file. FUNCTION takes no arguments and returns `(step, args)`, or `(step,
    args, options)` with keyword arguments of `jaxmem.estimate`. The arguments are
    arrays or `jax.ShapeDtypeStruct`. With this in `train.py`:

        def for_jaxmem():
            params = jax.eval_shape(init, jax.random.key(0))
            batch = jax.ShapeDtypeStruct((8, 512), "int32")
            return train_step, (params, batch), {"donate_argnums": (0,)}

    the command is `jaxmem estimate train:for_jaxmem --target h100 --max 14GiB`.

    Exits 0 where the step fits, 1 where it does not, 2 on bad usage, 3 where the step
    cannot be traced or compiled.
    """
    limit = None if maximum is None else _size(maximum)
    step = load_step(function)
    if donate:
        step.options["donate_argnums"] = tuple(donate)
    if target:
        step.options["target"] = target
    report = _estimate(step)
    _print(report)
    if json_path:
        json_path.write_text(report.to_json(indent=2) + "\n")
    if plot_path:
        _plot(report, plot_path)
    if limit is not None:
        _check_limit(report.peak_bytes, limit)


@app.command()
def layout(
    file: Annotated[Path, typer.Argument(help="CSV: id, lower, upper, size.")],
    capacity: Annotated[
        str | None,
        typer.Option(
            help="Bytes of the arena, as in 1048576 or 1MiB; without, the least."
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option(min=0, help="Seconds after which the best is taken.")
    ] = 10.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    output: Annotated[
        Path | None, typer.Option(help="CSV to write, with a column of offsets.")
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw the arena over time.")
    ] = None,
) -> None:
    """Find offsets in one arena for buffers with lifetimes, with the arena small.

    FILE has a header line and one line for each buffer, which is alive from `lower` up
    to but not including `upper`: the format of minimalloc's benchmark.

    Exits 0 with a layout, 1 where none was found within the capacity (the best one is
    written all the same), 2 on bad usage.
    """
    from jaxmem.planning import NoLayoutError, read_buffers, write_buffers

    failure = None
    try:
        limit = None if capacity is None else _size(capacity)
        buffers = read_buffers(file)
        result = _laid_out(buffers, limit, time_limit, seed)
    except NoLayoutError as error:
        failure, result = error, error.best
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    _print(result)
    if output:
        write_buffers(output, result.buffers, result.offsets)
    if plot_path:
        _plot(result, plot_path)
    if failure:
        typer.echo(str(failure), err=True)
        raise typer.Exit(DOES_NOT_FIT)


@app.command()
def targets() -> None:
    """List the known chips, their memory, and which can be compiled for here."""
    import jaxmem

    _print(jaxmem.targets())


def load_step(spec: str) -> StepToMeasure:
    """The step that MODULE:FUNCTION returns.

    Raises:
        typer.BadParameter: where there is no such module or function, or it returns
            something else than a step with its arguments.
    """
    module_name, colon, name = spec.rpartition(":")
    if not (colon and module_name and name):
        raise typer.BadParameter(f"expected MODULE:FUNCTION, got {spec!r}")
    function = getattr(_load_module(module_name), name, None)
    if not callable(function):
        raise typer.BadParameter(f"{module_name!r} has no function {name!r}")
    return _checked(function, spec)


def _checked(function, spec: str) -> StepToMeasure:
    import inspect

    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise typer.BadParameter(
            f"{spec} must take no arguments and return (step, args): {error}"
        ) from error
    match function():
        case (step, tuple(args)) if callable(step):
            return StepToMeasure(step, args, {})
        case (step, tuple(args), dict(options)) if callable(step):
            return StepToMeasure(step, args, dict(options))
        case other:
            raise typer.BadParameter(
                f"{spec} must return (step, args) or (step, args, options) with args a "
                f"tuple and options a dict, got {type(other).__name__}"
            )


def _load_module(name: str):
    if name.endswith(".py"):
        return _load_file(Path(name))
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but something that it imports does not
        raise typer.BadParameter(f"no module {name!r} in {Path.cwd()}") from error


def _load_file(path: Path):
    if not path.is_file():
        raise typer.BadParameter(f"no file {str(path)!r}")
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _size(text: str) -> int:
    from jaxmem._bytes import parse_bytes

    try:
        return parse_bytes(text, "size")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _estimate(step: StepToMeasure):
    import jaxmem

    try:
        return jaxmem.estimate(step.fn, *step.args, **step.options)
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error
    except Exception as error:
        typer.echo(f"the step failed: {type(error).__name__}: {error}", err=True)
        raise typer.Exit(FAILED) from error


def _laid_out(buffers, capacity: int | None, time_limit: float, seed: int):
    """The layout, with a progress bar over the time limit."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from jaxmem.planning import layout

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("best fit", total=time_limit)

        def show(height: int, bound: int) -> None:
            text = f"height {height:,} of at least {bound:,}"
            bar.update(task, description=text, completed=bar.tasks[0].elapsed or 0.0)

        return layout(
            buffers,
            capacity=capacity,
            time_limit=time_limit,
            seed=seed,
            progress=show,
        )


def _plot(report, path: Path) -> None:
    try:
        report.plot(path)
    except (ValueError, ImportError) as error:
        typer.echo(f"no picture: {error}", err=True)
        raise typer.Exit(FAILED) from error


def _check_limit(peak: int, limit: int) -> None:
    sizes = f"the peak of {peak / 2**30:.3f} GiB and {limit / 2**30:.3f} GiB allowed"
    difference = abs(peak - limit) / 2**30
    if peak > limit:
        typer.echo(f"does not fit: {sizes}, {difference:.3f} GiB too much", err=True)
        raise typer.Exit(DOES_NOT_FIT)
    typer.echo(f"fits: {sizes}, {difference:.3f} GiB to spare")


def _print(what) -> None:
    from rich.console import Console

    Console().print(what)


if __name__ == "__main__":
    main()
