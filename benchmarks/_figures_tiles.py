"""The figures of docs/tiles.md."""

from benchmarks._figures_of import figures, rows, table
from benchmarks._figures_techniques import CHIPS

WAYS = {
    "plain": "plain",
    "remat": "`jax.checkpoint`",
    "by hand, schedule": "by hand, `schedule`",
    "whole": "`schedule(tile=False)`",
    "least": "`schedule`",
}


@figures("tiles, bytes")
def tiles() -> str:
    """MiB of temporaries by how a step is written; empty where not measured."""
    found = {(r["step"], r["target"], r["how"]): r["temp MiB"] for r in rows("tiles")}
    steps = dict.fromkeys(key[:2] for key in found if key[2] == "least")
    lines = []
    for step, chip in steps:
        cells = [found.get((step, chip, how), "") for how in WAYS]
        lines.append((step, CHIPS[chip], *map(_shown, cells)))
    return table(("step", "chip", *WAYS.values()), lines)


def _shown(cell: str) -> str:
    return f"{float(cell):,.0f}" if cell.replace(".", "").isdigit() else cell


@figures("tiles, budgets")
def budgets() -> str:
    """What is recomputed in some bytes without tiles, and with them."""
    columns = "without tiles %", "recomputes %"
    lines = [
        (
            r["model"],
            f"{float(r['budget MiB']):,.0f}",
            *(f"{float(r[c]):.1f}" for c in columns),
            r["tiles"],
        )
        for r in rows("tiles_budget")
    ]
    head = "model", "temporaries, MiB", "without tiles: recomputed, %", "with tiles, %"
    return table((*head, "tiles"), lines)
