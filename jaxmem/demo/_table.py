"""The table of the demonstration: plain beside substituted."""

from collections.abc import Iterator
from statistics import fmean

from rich.table import Table
from rich.text import Text

from jaxmem.demo._compare import Comparison

_LAST = 10
_MASKS = "different dropout masks by design: the losses agree only in the long run"
_ADAMA = """\
AdamA adds up squares of micro-batch gradients where AdamW squares their mean: other
steps by design, the losses agree only in the long run
clipped by a global norm: with AdamW the mean gradient, with AdamA each micro-batch's,
in a second backward pass (clip="two_pass"); without, no gradient could be released"""

_VMEM = "what a TPU keeps in its VMEM is not in these bytes: most of a step this small"


def table(result: Comparison) -> Table:
    """A rich table of losses, bytes, batches and seconds of both runs."""
    s = result.settings
    grid = Table(
        title=f"{s.layers}-layer byte GPT ({s.model}), {s.batch} x {s.context} bytes "
        f"a step{_split(result)}, {s.steps} steps",
        caption=_caption(result),
        title_justify="left",
        caption_justify="left",
    )
    grid.add_column("")
    for name in (*_columns(result), "ratio"):
        grid.add_column(name, justify="right")
    for row in _rows(result):
        grid.add_row(*row)
    return grid


def _split(result: Comparison) -> str:
    n = result.settings.n
    return f" in {n} micro-batches" if n > 1 else ""


def _columns(result: Comparison) -> tuple[str, str]:
    technique = result.settings.technique
    lean = "substituted" if technique == "exact" else technique
    if result.settings.optimizer == "adamw":
        return "plain", lean
    return "plain, AdamW accumulated", f"{lean}, AdamA"


def _caption(result: Comparison) -> Text:
    lines = [f"largest difference of the losses at any step: {result.loss_gap:.1e}"]
    if result.settings.optimizer == "adama":
        lines.append(_ADAMA)
    if result.settings.n > 1 and any("tpu" in t for t in result.plain.compiled):
        lines.append(_VMEM)
    if result.settings.how.note:
        lines.append(result.settings.how.note)
    if result.settings.dropout:
        lines.append(_MASKS)
    return Text("\n".join([*lines, *result.problems]))


def _rows(result: Comparison) -> Iterator[tuple[str, str, str, str]]:
    a, b = result.plain, result.substituted
    last = (fmean(x.losses[-_LAST:]) for x in (a, b))
    yield _row(f"training loss, last {_LAST} steps", *last, shape="{:.4f}")
    yield _row("validation loss", a.validation, b.validation, "{:.4f}")
    yield _mib("residuals, MiB", a.residual_bytes, b.residual_bytes)
    for target in _both(a.compiled, b.compiled):
        temp = (x.compiled[target].temp_bytes for x in (a, b))
        yield _mib(f"compiled for {target}, MiB of temp", *temp)
        if result.settings.n > 1:  # with the moments, which accumulation adds to
            peak = (x.compiled[target].peak_bytes for x in (a, b))
            yield _mib(f"compiled for {target}, MiB at the peak", *peak)
    for target in _both(a.largest_batch, b.largest_batch):
        largest = [x.largest_batch[target] for x in (a, b)]
        sure = "" if all(x.confirmed for x in largest) else ", predicted"
        batches = (x.batch for x in largest)
        yield _row(f"largest batch on {target}{sure}", *batches, shape="{:,}")
    ratio = f"{result.time_ratio:.2f}"
    yield _row("seconds a step, here", a.seconds, b.seconds, "{:.3f}")[:3] + (ratio,)


def _both(a: dict, b: dict) -> list[str]:
    return [target for target in a if target in b]


def _row(name: str, plain, substituted, shape: str) -> tuple[str, str, str, str]:
    ratio = f"{substituted / plain:.2f}" if plain else "-"
    return name, shape.format(plain), shape.format(substituted), ratio


def _mib(name: str, plain: int, substituted: int) -> tuple[str, str, str, str]:
    return _row(name, plain / 2**20, substituted / 2**20, "{:,.1f}")
