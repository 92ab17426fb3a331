"""The demonstration as a command: progress bars, the table, a PNG and a JSON."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

import jaxmem
from jaxmem.demo.comparison import Comparison, compare
from jaxmem.demo.figures import draw
from jaxmem.demo.optimizers import OPTIMIZERS
from jaxmem.demo.settings import Settings

_LAST = 10
_MASKS = "different dropout masks by design: the losses agree only in the long run"
_ADAMA = """\
AdamA adds up squares of micro-batch gradients where AdamW squares their mean: other
steps by design, the losses agree only in the long run
clipped by a global norm: with AdamW the mean gradient, with AdamA each micro-batch's,
in a second backward pass (clip="two_pass"); without, no gradient could be released"""
_SECONDS = "ratio of the seconds: the median of the ratios at each step"
_VMEM = "what a TPU keeps in its VMEM is not in these bytes: most of a step this small"


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
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    columns = TextColumn("{task.description:<10}"), *columns
    note = TextColumn("{task.fields[note]}")
    with Progress(*columns, note, console=console) as progress:
        result = compare(settings, targets, **_listeners(progress, settings))
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
    """cpu, and of two accelerators those this installation can compile for."""
    ready = {t.name for t in jaxmem.targets() if t.available}
    return ["cpu", *(name for name in ("h100", "tpu-v5e") if name in ready)]


def checked(targets: Sequence[str]) -> list[str]:
    """The targets without repetitions; ValueError if one cannot be compiled for."""
    known = {t.name: t for t in jaxmem.targets()}
    for name in targets:
        if name not in known:
            raise ValueError(f"unknown target {name!r}: know {', '.join(known)}")
        if not known[name].available:
            raise ValueError(f"cannot compile for {name!r}: {known[name].why_not}")
    return list(dict.fromkeys(targets))


def _listeners(progress: Progress, settings: Settings) -> dict[str, Any]:
    training = progress.add_task("training", total=settings.steps, note="compiling")
    measuring = progress.add_task("measuring", total=None, note="", start=False)

    def on_step(step, losses):
        note = "  ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
        progress.update(training, completed=step, note=note)

    def on_compile(done, total, what):
        progress.start_task(measuring)
        progress.update(measuring, completed=done, total=total, note=what)

    return {"on_step": on_step, "on_compile": on_compile}


def table(result: Comparison) -> Table:
    """A rich table of losses, bytes, batches and seconds of both runs."""
    s = result.settings
    split = f" in {s.n} micro-batches" if s.n > 1 else ""
    lean = "substituted" if s.technique == "exact" else s.technique
    names = "plain", lean
    if s.optimizer != "adamw":
        names = "plain, adamw", f"{lean}, {s.optimizer}"
    grid = Table(
        title=f"{s.layers}-layer byte GPT ({s.model}), {s.batch} x {s.context} bytes "
        f"a step{split}, {s.steps} steps",
        caption=_caption(result),
        title_justify="left",
        caption_justify="left",
    )
    grid.add_column("")
    for name in (*names, "ratio"):
        grid.add_column(name, justify="right")
    for name, plain, substituted, shape in _rows(result):
        ratio = f"{substituted / plain:.2f}" if plain else "-"
        grid.add_row(name, shape.format(plain), shape.format(substituted), ratio)
    seconds = (f"{x.seconds:.3f}" for x in (result.plain, result.substituted))
    grid.add_row("seconds a step, here", *seconds, f"{result.time_ratio:.2f}")
    return grid


def _caption(result: Comparison) -> Text:
    settings, targets = result.settings, result.plain.compiled
    remarks = {
        _ADAMA: OPTIMIZERS[settings.optimizer].in_state,
        _VMEM: settings.n > 1 and any("tpu" in target for target in targets),
        settings.how.note: settings.how.note,
        _MASKS: settings.dropout,
    }
    lines = [f"largest difference of the losses at any step: {result.loss_gap:.1e}"]
    lines += [_SECONDS, *(remark for remark, applies in remarks.items() if applies)]
    return Text("\n".join([*lines, *_by_reason(result.problems)]))


def _by_reason(problems: Sequence[str]) -> Iterator[str]:
    """What failed for one reason is one line."""
    what: dict[str, list[str]] = {}
    for problem in problems:
        name, _, reason = problem.partition(": ")
        what.setdefault(reason, []).append(name)
    return (f"{', '.join(names)}: {reason}" for reason, names in what.items())


def _rows(result: Comparison) -> Iterator[tuple[str, float, float, str]]:
    """(what, plain, substituted, how the numbers are written)."""

    def row(what, of, shape="{:,.1f}", unit=2**20):
        return what, of(result.plain) / unit, of(result.substituted) / unit, shape

    losses = lambda x: fmean(x.losses[-_LAST:])
    yield row(f"training loss, last {_LAST} steps", losses, "{:.4f}", 1)
    yield row("validation loss", lambda x: x.validation, "{:.4f}", 1)
    yield row("residuals, MiB", lambda x: x.residual_bytes)
    for target in _both(result, "compiled"):
        temp = lambda x, t=target: x.compiled[t].temp_bytes
        yield row(f"compiled for {target}, MiB of temp", temp)
        if result.settings.n > 1:  # with the moments, which accumulation adds to
            peak = lambda x, t=target: x.compiled[t].peak_bytes
            yield row(f"compiled for {target}, MiB at the peak", peak)
    for target in _both(result, "largest_batch"):
        a, b = (x.largest_batch[target] for x in (result.plain, result.substituted))
        sure = "" if a.confirmed and b.confirmed else ", predicted"
        yield f"largest batch on {target}{sure}", a.batch, b.batch, "{:,}"


def _both(result: Comparison, figure: str) -> list[str]:
    """The targets that both runs have this figure of."""
    plain, lean = (getattr(x, figure) for x in (result.plain, result.substituted))
    return [target for target in plain if target in lean]
