"""The demonstration as a command: progress bars, the table, a PNG and a JSON."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

import jaxmem
from jaxmem.demo._compare import Comparison, Listener, compare
from jaxmem.demo._figures import draw
from jaxmem.demo._settings import Settings
from jaxmem.demo._table import table

WISHED = ("h100", "tpu-v5e")


def run(
    settings: Settings,
    targets: Sequence[str] | None,
    out: Path,
    console: Console | None = None,
) -> Comparison:
    """Trains, measures, prints the table, and writes `demo.png` and `demo.json`."""
    console = console or Console()
    targets = default_targets() if targets is None else checked(targets)
    out.mkdir(parents=True, exist_ok=True)
    with _progress(console) as progress:
        listener = _listener(progress, settings)
        result = compare(settings, targets, listener)
    console.print(table(result))
    (out / "demo.json").write_text(json.dumps(result.to_json(), indent=2) + "\n")
    console.print(f"wrote {out / 'demo.json'}")
    try:
        draw(result, out / "demo.png")
        console.print(f"wrote {out / 'demo.png'}")
    except ImportError as error:
        console.print(f"no picture: {error}", markup=False)
    return result


def default_targets() -> list[str]:
    """cpu, and of a few accelerators those this installation can compile for."""
    ready = {t.name for t in jaxmem.targets() if t.available}
    return ["cpu", *(name for name in WISHED if name in ready)]


def checked(targets: Sequence[str]) -> list[str]:
    """The targets, each once; a ValueError where one cannot be compiled for."""
    known = {t.name: t for t in jaxmem.targets()}
    for name in targets:
        if name not in known:
            raise ValueError(f"unknown target {name!r}: know {', '.join(known)}")
        if not known[name].available:
            raise ValueError(f"cannot compile for {name!r}: {known[name].why_not}")
    return list(dict.fromkeys(targets))


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def _listener(progress: Progress, settings: Settings) -> Listener:
    training = progress.add_task("training", total=settings.steps, note="compiling")
    measuring = progress.add_task("measuring", total=None, note="", start=False)

    def on_step(step, losses):
        note = "  ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
        progress.update(training, completed=step, note=note)

    def on_measure(done, total, what):
        progress.start_task(measuring)
        progress.update(measuring, completed=done, total=total, note=what)

    return Listener(on_step, on_measure)
