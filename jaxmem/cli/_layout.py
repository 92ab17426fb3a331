"""`jaxmem layout`."""

from pathlib import Path
from typing import Annotated

import typer

from jaxmem.cli import _options as opt
from jaxmem.cli._output import does_not_fit, show
from jaxmem.cli._written import to_write


def layout(
    file: Annotated[Path, typer.Argument(help="CSV: id, lower, upper, size.")],
    capacity: Annotated[
        str | None,
        typer.Option(
            help="Size of the arena, such as 1048576 or 1MiB; by default as small as "
            "possible."
        ),
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option(
            min=0,
            help="Stop after this many seconds with the best layout.",
            callback=opt.seconds,
        ),
    ] = 10.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            help="CSV file to write, with a column of offsets.", callback=to_write()
        ),
    ] = None,
    json_path: opt.Json = None,
    plot_path: opt.Plot = None,
) -> None:
    """Find offsets for buffers with given lifetimes in an arena as small as possible.

    FILE has a header line and one line for each buffer, which is live from `lower` up
    to but not including `upper`: the format of minimalloc's benchmark.

    Exits 0 with a layout, 1 if none was found within the capacity (the best one is
    written anyway), 2 on a usage error, 3 if no picture can be drawn.
    """
    from jaxmem.planning import NoLayoutError, read_buffers, write_buffers

    failure = None
    try:
        limit = opt.size(capacity, "--capacity")
        buffers = read_buffers(file)
        result = _laid_out(buffers, limit, time_limit, seed)
    except NoLayoutError as error:
        failure, result = error, error.best
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    show(result, json_path, plot_path)
    if output:
        write_buffers(output, result.buffers, result.offsets)
    if failure:
        does_not_fit(str(failure))


def _laid_out(buffers, capacity: int | None, time_limit: float, seed: int):
    """The layout, with the best so far shown while it is searched for."""
    from jaxmem._progress import spinner
    from jaxmem.planning import layout

    with spinner(True, "best fit") as tell:
        return layout(
            buffers,
            capacity=capacity,
            time_limit=time_limit,
            seed=seed,
            progress=lambda height, bound: tell(
                f"height {height:,} of at least {bound:,}"
            ),
        )
