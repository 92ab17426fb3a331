"""The figures of docs/tiles.md."""

from benchmarks.figures.rows import (
    TEMP_AND_MS,
    beside_older,
    figures,
    rows,
    table,
    with_ms,
)
from benchmarks.steps.tiles import BERT

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
    """MiB / predicted ms by how a step is written; empty where not measured."""
    found = {
        (r["step"], r["how"]): beside_older(
            *("tiles", TEMP_AND_MS),
            {column: r[column] for column in ("step", "how", "target")},
        )
        for r in rows("tiles")
        if r["target"] == "h100"
    }
    steps = dict.fromkeys(step for step, how in found if "tiles" in how)
    lines = []
    for step in steps:
        cells = [[found.get((step, how), "") for how in hows] for hows in WAYS.values()]
        lines.append((step, *map("".join, cells)))
    return table(("step", *WAYS), lines)


SENT = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")


@figures("tiles, sharded")
def sharded() -> str:
    """What a device holds and sends, by how the step is written."""
    of = {"temp MiB": "temporaries"} | {f"{kind} MiB": kind for kind in SENT}
    of |= {"collective-permute MiB": "permute", "of these in tiles MiB": "in tiles"}
    found = rows("tiles_collectives")
    cells = ([f"{float(r[name]):,.0f}" for name in of] for r in found)
    names = ((r["sharding"], r["how"]) for r in found)
    lines = [(*name, *cell) for name, cell in zip(names, cells, strict=True)]
    return table(("sharding", "how", *of.values()), lines)


@figures("tiles, micro-batches")
def micro_batches() -> str:
    """One step as it is, with micro-batches that it is told, and that are found."""
    titles = {
        "plain": "plain",
        "schedule": "`schedule` without a budget",
        "microbatch": "`jaxmem.microbatch`, 8 micro-batches",
        "12500 MiB": "`schedule` with the budget",
    }
    found = {r["how"]: r for r in rows("tiles") if r["step"] == BERT}
    cell = lambda how, columns: beside_older(
        "tiles", columns, {"step": BERT, "how": how}
    )
    lines = [
        (
            *(title, cell(how, TEMP_AND_MS), cell(how, {"peak MiB": ",.0f"})),
            *(found[how]["matmul TF"], found[how]["tiles"]),
        )
        for how, title in titles.items()
    ]
    columns = ("peak", "TF of products", "parts")
    return table(("how", with_ms("tiles", "temporaries"), *columns), lines)
