"""`jaxmem demo`."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from jaxmem.cli._options import Json, check_target
from jaxmem.cli._output import write_json
from jaxmem.cli._written import STDOUT, folder_to_write


class Flavour(StrEnum):
    """Which Flax API the demo's model is written in."""

    nnx = "nnx"
    linen = "linen"


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
            help="Optimizer of the substituted run; the plain run uses adamw. "
            "adama, adamw-8bit, "
            "adamw-float8, adamw-4bit, adama-8bit, adamw-host, lion, lion-8bit, "
            "lion-4bit, schedule-free, schedule-free-8bit, schedule-free-4bit, "
            "galore, galore-8bit, apollo, apollo-mini, fira, came, "
            "adafactor, adalomo, lomo, sm3, adam-mini, soap, soap-8bit, "
            "soap-one-sided-8bit, shampoo or shampoo-8bit."
        ),
    ] = "adamw",
    micro_batches: Annotated[
        int | None,
        typer.Option(
            min=1, help="Micro-batches in both runs.  [default: 1; with adama, 8]"
        ),
    ] = None,
    technique: Annotated[
        str,
        typer.Option(
            help="Technique of the second run. Exact: exact, elementwise, ms-norm, "
            "linear-cross-entropy, frozen. Approximate: bits-1, bits-2, bits-3, "
            "bits-4, regelu2, storage-8, storage-float8, storage-4. With --model linen "
            "also lora, wta-crs and velora."
        ),
    ] = "exact",
    target: Annotated[
        list[str] | None,
        typer.Option(help="Chip to compile for; can be repeated. See `targets`."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the results.", callback=folder_to_write)
    ] = Path("jaxmem-demo"),
    json_path: Json = None,
) -> None:
    """Train a small GPT plain and substituted, and print the bytes of both.

    The text is the source code of Python's standard library. Writes `demo.png` and
    `demo.json` into the folder `--out`. Takes less than 3 minutes on 2 cores.

    With `--optimizer adama` the plain model trains with AdamW on gradients accumulated
    over micro-batches, the substituted one through `jaxmem.microbatch` with AdamA.

    With `--technique frozen` or `lora` both runs train the same part of the parameters.
    With `inplace-abn` both have batch norms in their MLPs.

    Exits 0, 2 on a usage error, 3 if something fails.
    """
    from rich.console import Console

    from jaxmem._progress import spinner
    from jaxmem.demo import Settings, run

    for name in target or ():
        check_target(name)
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
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    # with the JSON on standard output, tables are for standard error
    console = Console(stderr=True) if json_path == STDOUT else Console()
    # on a terminal the demonstration has progress bars of its own
    with spinner(not sys.stderr.isatty(), "training and compiling"):
        result = run(settings, target, out, console)
    if json_path is not None:
        write_json(result.to_json(), json_path)
