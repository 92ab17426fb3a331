"""`jaxmem advise`."""

from typing import Annotated

import typer

from jaxmem.cli import _options as opt
from jaxmem.cli._output import does_not_fit, show


def advise(
    function: opt.Function,
    arguments: opt.Arguments = None,
    batch: opt.Batch = None,
    target: opt.Chip = None,
    budget: opt.Budget = None,
    every: Annotated[
        bool,
        typer.Option(
            "--every", help="Also compile the techniques after the first that fits."
        ),
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TECHNIQUE",
            help="An approximate technique to try: bits, moments, adama; can "
            "be repeated.",
        ),
    ] = None,
    donate: opt.Donate = None,
    static: opt.Static = None,
    json_path: opt.Json = None,
    html_path: opt.Html = None,
    plot_path: opt.Plot = None,
) -> None:
    """Find out what makes a step fit, and print the code to write.

    Techniques are compiled one after another, the cheapest first. For example
    `jaxmem advise train:for_jaxmem --target l4 --budget 16GiB`. For a loss, pass its
    optimizer as `{"tx": ...}` in the options.

    Exits 0 if a technique fits the budget, 1 if none does, 2 on a usage error, 3 if the
    step cannot be imported, traced or compiled.
    """
    import jaxmem
    from jaxmem.advising.measures import APPROXIMATE
    from jaxmem.chips import get_target, local_target

    if unknown := set(allow or ()) - set(APPROXIMATE):
        words = f"{sorted(unknown)[0]}: one of {', '.join(APPROXIMATE)}"
        raise typer.BadParameter(f"--allow {words}")
    room = opt.budget_of(budget)
    how = {"target": target, "donate": donate, "static": static}
    found, args = opt.named(function, arguments, batch, **how)
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
        does_not_fit(f"no technique that was tried, on {advice.target}")
