"""The table of the demonstration: plain beside substituted."""

from collections.abc import Iterator
from statistics import fmean

from rich.table import Table
from rich.text import Text

from jaxmem.demo._compare import Comparison

_LAST = 10
_MASKS = "different dropout masks by design: the losses agree only in the long run"


def table(result: Comparison) -> Table:
    """A rich table of losses, bytes, batches and seconds of both runs."""
    s = result.settings
    grid = Table(
        title=f"{s.layers}-layer byte GPT ({s.model}), {s.batch} x {s.context} bytes "
        f"a step, {s.steps} steps",
        caption=_caption(result),
        title_justify="left",
        caption_justify="left",
    )
    grid.add_column("")
    for name in ("plain", "substituted", "ratio"):
        grid.add_column(name, justify="right")
    for row in _rows(result):
        grid.add_row(*row)
    return grid


def _caption(result: Comparison) -> Text:
    lines = [f"largest difference of the losses at any step: {result.loss_gap:.1e}"]
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
