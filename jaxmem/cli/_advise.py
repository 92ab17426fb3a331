"""`jaxmem advise`."""

from typing import Annotated

import typer

from jaxmem.cli._options import (
    Arguments,
    Batch,
    Chip,
    Donate,
    Function,
    Html,
    Json,
    Plot,
    Static,
    named,
    size,
)
from jaxmem.cli._output import does_not_fit, show


def advise(
    function: Function,
    arguments: Arguments = None,
    batch: Batch = None,
    target: Chip = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The peak that is allowed, as in 14GiB."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--every", help="Compile also what comes after a fit.")
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MEASURE",
            help="An approximate measure that may be tried: bits, moments, adama; may "
            "be given again.",
        ),
    ] = None,
    donate: Donate = None,
    static: Static = None,
    json_path: Json = None,
    html_path: Html = None,
    plot_path: Plot = None,
) -> None:
    """Find what makes a step fit, and show the line to write.

    Measures are compiled one after another, those that cost least time first. For
    example `jaxmem advise train:for_jaxmem --target l4 --budget 16GiB`. A loss brings
    its optimizer along, as `{"tx": ...}` in the options.

    Exits 0 where a measure fits the budget, 1 where none does, 2 on wrong use, 3 where
    the step cannot be imported, traced or compiled.
    """
    import jaxmem
    from jaxmem.advising.measures import APPROXIMATE
    from jaxmem.chips import get_target, local_target

    if unknown := set(allow or ()) - set(APPROXIMATE):
        words = f"{sorted(unknown)[0]}: one of {', '.join(APPROXIMATE)}"
        raise typer.BadParameter(f"--allow {words}")
    room = size(budget, "--budget")
    if room == 0:
        raise typer.BadParameter("--budget 0: more than 0 bytes")
    how = {"target": target, "donate": donate, "static": static}
    found, args = named(function, arguments, batch, **how)
    if "tx" in found.options and (donate or static):
        raise typer.BadParameter("--donate, --static: a loss with its tx takes none")
    chip = found.options.get("target")
    chip = local_target() if chip is None else get_target(chip)
    if room is None and chip.memory_bytes is None:
        raise typer.BadParameter(f"the memory of {chip.name} is not known: --budget")
    of_compiles = ("timeout", "cache", "full", "compiler_options", "clip")
    options = {k: v for k, v in found.options.items() if k not in of_compiles}
    options |= {"budget": budget, "every": every}
    if allow:
        options["allow"] = tuple(allow)
    advice = jaxmem.advise(found.fn, *args, **options)
    show(advice, json_path, plot_path, html=html_path)
    if advice.taken is None:
        does_not_fit(f"nothing that was tried, on {advice.target}")
