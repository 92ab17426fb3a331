"""The figures of docs/advise.md."""

from benchmarks.figures.rows import figures, rows, table


@figures("advice")
def advice() -> str:
    """Per model and batch: bytes as it is, the measure that fits, and its bytes."""
    found: dict[tuple[str, str], list] = {}
    for row in rows("advice"):
        found.setdefault((row["model"], row["batch"]), []).append(row)
    size = lambda row: f"{float(row['peak MiB']):,.0f}"
    lines = []
    for (model, batch), measures in found.items():
        first, last = measures[0], measures[-1]
        of = first["plain batch"], batch, size(first), last["measure"], size(last)
        lines.append((model, *of, f"{float(last['recomputed ms']):.3g}"))
    head = ("model", "plain batch", "batch", "as it is", "with", "then")
    return table((*head, "recomputed ms"), lines)
