"""`jaxmem plan`."""

from enum import StrEnum
from typing import Annotated, Any

import typer

from jaxmem.cli import _options as opt
from jaxmem.cli._app import one_line
from jaxmem.cli._output import does_not_fit, show


class Clipping(StrEnum):
    """How a step that clips by the global norm is scheduled."""

    two_pass = "two_pass"


def plan(
    function: opt.Function,
    arguments: opt.Arguments = None,
    batch: opt.Batch = None,
    target: opt.Chip = None,
    budget: opt.Budget = None,
    donate: opt.Donate = None,
    static: opt.Static = None,
    clip: Annotated[
        Clipping | None,
        typer.Option(help="Clip by the global norm in two backward passes."),
    ] = None,
    offload: Annotated[
        bool,
        typer.Option("--offload", help="Allow residuals to be offloaded to the host."),
    ] = False,
    host_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="With --offload: host memory for one device."
        ),
    ] = None,
    tile: Annotated[
        bool, typer.Option("--tile/--no-tile", help="Allow regions to run in tiles.")
    ] = True,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use the first plan that fits.")
    ] = False,
    search_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Stop the search after this many seconds with the best plan.",
            callback=opt.seconds,
        ),
    ] = None,
    json_path: opt.Json = None,
    html_path: opt.Html = None,
    plot_path: opt.Plot = None,
) -> None:
    """Show what `jaxmem.schedule` changes in a step, and the resulting bytes.

    `jaxmem.scheduling.Plan.from_json` reads the JSON for `jaxmem.schedule(step,
    plan=...)`. For example `jaxmem plan train:for_jaxmem --target h100 --budget 14GiB`.

    Exits 0 if the scheduled step fits the budget and the chip, 1 if it does not, 2 on a
    usage error, 3 if the step cannot be imported, traced or compiled.
    """
    import jaxmem
    from jaxmem.memory import DoesNotFit
    from jaxmem.scheduling import BudgetError

    room = opt.budget_of(budget)
    if offload and room is None:
        raise typer.BadParameter("--offload: needs a --budget")
    host_room = opt.budget_of(host_budget, "--host-budget")
    if host_room is not None and not offload:
        raise typer.BadParameter("--host-budget: needs --offload")
    if quick and room is None:
        raise typer.BadParameter("--quick: needs a --budget")
    how = {"target": target, "donate": donate, "static": static}
    found, args = opt.named(function, arguments, batch, **how)
    settings, kwargs = _settings(found.options)
    chip = settings.get("target")
    if search_seconds is not None and room is None and chip is None:
        raise typer.BadParameter("--search-seconds: needs a --budget or a --target")
    if plot_path is not None and chip is None:
        raise typer.BadParameter("--plot: needs a --target, whose compiles it shows")
    if clip is not None:
        settings["clip"] = clip.value
    try:
        step = jaxmem.schedule(
            found.fn,
            room,
            offload=offload,
            host_budget=host_room,
            tile=tile,
            quick=quick,
            search_seconds=search_seconds,
            **settings,
        )
        made = step.plan(*args, target=chip, **kwargs)
    except (BudgetError, DoesNotFit) as error:
        does_not_fit(one_line(str(error)))
        return
    show(made, json_path, plot_path, html=html_path)
    report = made.scheduled
    if made.target and (report is None or _is_too_large(report)):
        does_not_fit(f"the scheduled step, on {made.target}")


def _settings(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `schedule` takes, and the step's own keyword arguments."""
    places = (f"{kind}_arg{what}" for kind in ("donate", "static") for what in _WHAT)
    settings = {"target", "compiler_options", "clip", *places}
    of_compiles = {"timeout", "cache", "full"}  # a plan has its own
    own = {k: v for k, v in options.items() if k in settings}
    rest = {k: v for k, v in options.items() if k not in settings | of_compiles}
    return own, rest


_WHAT = "nums", "names"


def _is_too_large(report: Any) -> bool:
    return report.memory_bytes is not None and not report.fits()
