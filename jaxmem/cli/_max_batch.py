"""`jaxmem max-batch`."""

from typing import Annotated

import typer

from jaxmem.cli import _options as opt
from jaxmem.cli._output import does_not_fit, show


def max_batch(
    function: opt.Function,
    arguments: opt.Arguments = None,
    target: opt.Chip = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of one device, such as 14GiB.  [default: the chip's memory]",
        ),
    ] = None,
    multiple_of: Annotated[
        int, typer.Option(min=1, help="Only multiples of this number.")
    ] = 1,
    limit: Annotated[int, typer.Option(min=1, help="The largest batch to try.")] = 1
    << 20,
    minimum: Annotated[
        int, typer.Option("--min", min=1, help="The smallest acceptable batch.")
    ] = 1,
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="Find the batch with the most examples per second instead."
        ),
    ] = False,
    donate: opt.Donate = None,
    static: opt.Static = None,
    timeout: opt.Timeout = None,
    json_path: opt.Json = None,
) -> None:
    """Find the largest batch whose step fits a chip.

    The function that returns the arguments has a parameter `batch`: FUNCTION itself,
    which returns `(step, args)`, or the function of `--args`.

        def args(batch):
            params = jax.eval_shape(init, jax.random.key(0))
            return params, jax.ShapeDtypeStruct((batch, 512), "int32")

    Exits 0 with a batch, 1 if not even `--min` fits, 2 on a usage error, 3 if the
    step cannot be imported, traced or compiled.
    """
    import jaxmem
    from jaxmem.chips import get_target

    room = opt.size(memory, "--memory")
    if limit < multiple_of:
        raise typer.BadParameter(f"--limit {limit} is less than --multiple-of")
    if limit < minimum:
        raise typer.BadParameter(f"--limit {limit} is less than --min {minimum}")
    how = {"target": target, "donate": donate, "static": static, "timeout": timeout}
    found, _ = opt.named(function, arguments, multiple_of, **how)
    chip = get_target(found.options.pop("target", None))
    if room is None and chip.memory_bytes is None:
        raise typer.BadParameter(f"the memory of {chip.name} is not known: --memory")
    search = jaxmem.best_batch if best else jaxmem.max_batch
    largest = search(
        *(found.fn, found.make_args, chip, room),
        multiple_of=multiple_of,
        limit=limit,
        **found.options,
    )
    memory_bytes = chip.memory_bytes if room is None else room
    result = {"batch": largest, "at_limit": largest.at_limit, "target": chip.name}
    result |= {"seconds": largest.seconds, "examples_per_second": largest.per_second}
    if json_path is None:
        typer.echo(int(largest))
    else:
        show(result | {"memory_bytes": memory_bytes}, json_path)
    if largest.seconds:
        ms, rate = 1e3 * largest.seconds, largest.per_second
        typer.echo(
            f"predicted: {ms:,.4g} ms a step, {rate:,.4g} examples a second", err=True
        )
    if largest.at_limit:
        typer.echo(f"{largest.real} is the limit: no larger batch was tried", err=True)
    if largest < minimum:
        does_not_fit(f"the largest batch on {chip.name} is {largest}")
