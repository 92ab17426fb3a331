"""`jaxmem estimate`."""

from typing import Annotated

import typer

from jaxmem.cli import _options as opt
from jaxmem.cli._app import one_line
from jaxmem.cli._output import check_limit, does_not_fit, show


def estimate(
    function: opt.Function,
    arguments: opt.Arguments = None,
    batch: opt.Batch = None,
    target: opt.Chip = None,
    maximum: Annotated[
        str | None,
        typer.Option(
            "--max",
            metavar="SIZE",
            help="Limit for the peak, such as 14GiB, in addition to the chip's memory.",
        ),
    ] = None,
    donate: opt.Donate = None,
    static: opt.Static = None,
    timeout: opt.Timeout = None,
    time: Annotated[
        bool,
        typer.Option("--time", help="Print a breakdown of the predicted seconds."),
    ] = False,
    json_path: opt.Json = None,
    html_path: opt.Html = None,
    plot_path: opt.Plot = None,
) -> None:
    """Print the bytes that a step takes on a chip, even if you do not have it.

    FUNCTION returns the step with its arguments, which are arrays or
    `jax.ShapeDtypeStruct`, and options of `jaxmem.estimate`. With this in `train.py`:

        def for_jaxmem():
            params = jax.eval_shape(init, jax.random.key(0))
            batch = jax.ShapeDtypeStruct((8, 512), "int32")
            return train_step, (params, batch), {"donate_argnums": (0,)}

    the command is `jaxmem estimate train:for_jaxmem --target h100 --max 14GiB`. With a
    function `args()` in `train.py` that returns `(params, batch)` it is
    `jaxmem estimate train:train_step --donate 0`.

    Exits 0 if the step fits, 1 if it does not, 2 on a usage error, 3 if the step
    cannot be imported, traced or compiled.
    """
    import jaxmem
    from jaxmem._progress import spinner
    from jaxmem.memory import DoesNotFit

    limit = opt.size(maximum, "--max")
    found, args = opt.named(
        *(function, arguments, batch),
        target=target,
        donate=donate,
        static=static,
        timeout=timeout,
    )
    chip = found.options.get("target") or "cpu"
    try:
        with spinner(True, f"compiling for {chip}"):
            report = jaxmem.estimate(found.fn, *args, **found.options)
    except DoesNotFit as error:
        does_not_fit(one_line(str(error)))
        return
    details = report.time if time else None
    show(report, json_path, plot_path, html=html_path, details=details)
    peak, memory = report.peak_bytes, report.memory_bytes
    check_limit("the peak", peak, limit, json_path, "--max")
    if limit is None or peak > (memory or peak):
        check_limit("the peak", peak, memory, json_path)
