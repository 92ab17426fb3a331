"""The figures of docs/tiles.md."""

from benchmarks._figures_of import figures, rows, table

# the titles of columns -> what the rows are named, the first that there is
WAYS = {
    "plain": ("plain",),
    "`jax.checkpoint`": ("remat",),
    "by hand, `schedule`": ("by hand, schedule",),
    "8 tiles": ("8 tiles", "8 tiles, recomputed"),
    "32 tiles": ("32 tiles", "32 tiles, recomputed"),
    "`schedule`, least": ("least",),
}


@figures("tiles, bytes")
def tiles() -> str:
    """MiB of temporaries by how a step is written; empty where not measured."""
    found = {
        (r["step"], r["how"]): f"{float(r['temp MiB']):,.0f}"
        for r in rows("tiles")
        if r["target"] == "h100"
    }
    steps = dict.fromkeys(step for step, how in found if "tiles" in how)
    lines = []
    for step in steps:
        cells = [[found.get((step, how), "") for how in hows] for hows in WAYS.values()]
        lines.append((step, *map("".join, cells)))
    return table(("step", *WAYS), lines)
