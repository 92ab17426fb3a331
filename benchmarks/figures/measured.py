"""Figures of what a device has measured: an H200's steps and peaks."""

from benchmarks.device import results
from benchmarks.figures.rows import RESULTS, figures, table

H200 = RESULTS / "device-h200-driver580.159.04-jax0.11.2.jsonl"
POLICIES = ("dots_with_no_batch_dims_saveable", "nothing_saveable")
Row = dict[str, float]


def steps() -> dict[str, dict[str, Row]]:
    """Model -> plain, a policy's name or "substitute" -> its row."""
    rows = results.read(H200)["seconds: steps"]["rows"]
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if "bound" not in row:
            model, _, what = row["step"].rpartition(", ")
            found.setdefault(model, {})[what] = row
    return {model: of for model, of in found.items() if "plain" in of}


def _best(of: dict[str, Row]) -> str:
    return min(POLICIES, key=lambda policy: of[policy]["ms"])


def _cell(row: Row) -> str:
    return f"{row['ms']:.1f} / {row['compiled MiB']:,.0f}"


@figures("device, steps")
def by_model() -> str:
    """Milliseconds that the device took, and MiB of the program that ran."""
    head = (
        "gradient of the loss on an H200: measured ms / MiB of the program",
        "plain",
        "the fastest policy",
        "`substitute`",
    )
    lines = []
    for model, of in steps().items():
        best = _best(of)
        cells = _cell(of["plain"]), f"{_cell(of[best])} (`{best}`)"
        lines.append((model, *cells, _cell(of["substitute"])))
    return table(head, lines)


@figures("device, BERT")
def of_bert() -> str:
    """A sentence's milliseconds."""
    of = steps()["BERT-Large, 8 x 512"]
    ours, plain, best = (of[n]["ms"] for n in ("substitute", "plain", _best(of)))
    return f"{ours:.0f} ms instead of {plain:.0f} (fastest policy of JAX: {best:.0f})"


def peaks() -> list[tuple[str, Row]]:
    """Name of a step, and its row, of those whose peak the device told."""
    found = results.read(H200).items()
    named = [(name, row) for name, one in found for row in one["rows"]]
    return [(name, row) for name, row in named if "measured MiB" in row]


@figures("device, peaks")
def of_peaks() -> str:
    """Peaks that the device reports beside the compiler's bytes."""
    head = ("step", "XLA's MiB", "measured peak, MiB", "XLA's / measured")
    lines = []
    for name, row in peaks():
        said, seen = row["compiled MiB"], row["measured MiB"]
        what = name.removeprefix("true: ").removeprefix("gradient, ")
        step = what if "gradient" in name else f"BERT-Large, 8 x 512, Adam: {what}"
        cells = f"{said:,.0f}", f"{seen:,.0f}", f"{said / seen:.3f}"
        lines.append((step, *cells))
    return table(head, lines)


@figures("device, peaks off")
def furthest() -> str:
    """By how much a measured peak is above the compiler's at most, in percent."""
    most = max(row["measured MiB"] / row["compiled MiB"] for _, row in peaks())
    return f"{100 * (most - 1):.1f}"
