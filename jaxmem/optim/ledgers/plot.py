"""Draws a ledger: bytes a parameter, one bar for the device and one for the host."""

from collections.abc import Sequence
from os import PathLike

from jaxmem.optim.ledgers.row import LedgerRow
from jaxmem.pages import import_figure

_COLOURS = {
    "weights": "#b8bec7",
    "gradients": "#4269d0",
    "accumulator": "#6cc5b0",
    "moments": "#efb118",
    "masters": "#ff725c",
}


def plot_ledger(
    parameters: int, rows: Sequence[LedgerRow], path: str | PathLike[str]
) -> None:
    """Writes the picture of so many parameters' rows to `path`."""
    places = ["device", "host"] if any(row.host_bytes for row in rows) else ["device"]
    figure = import_figure()(figsize=(9, 1.2 + 0.7 * len(places)), layout="constrained")
    axes = figure.add_subplot()
    left, shown = [0.0] * len(places), set()
    for row in rows:
        counts = (row.device_bytes, row.host_bytes)[: len(places)]
        widths = [count / max(parameters, 1) for count in counts]
        label = None if row.part in shown else row.part
        shown.add(row.part)
        axes.barh(
            places, widths, left=left, label=label,
            color=_COLOURS[row.part], edgecolor="white",
        )  # fmt: skip
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlabel="bytes a parameter", title=f"{parameters:,} parameters")
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=len(shown))
    figure.savefig(path, dpi=150)
