"""The figures of docs/frontier.md: `schedule` in the bytes of every policy."""

import statistics

from benchmarks.figures.rows import (
    TEMP_AND_MS,
    Row,
    figures,
    rows,
    table,
    with_older,
)

WITHOUT, PLAIN = "no budget", "plain"


def of_policies(model: str) -> list[Row]:
    """Rows of what recomputes on the device, with ours in as many bytes."""
    found = [r for r in rows("frontier") if r["model"] == model and r["ratio"]]
    return [r for r in found if r["policy"] not in (WITHOUT, PLAIN)]


def models() -> list[str]:
    return list(dict.fromkeys(r["model"] for r in rows("frontier")))


def _mean(found: list[Row]) -> float:
    return statistics.geometric_mean(float(r["ratio"]) for r in found)


def _both(r: Row, of: str = "") -> str:
    return with_older(r, r, {f"{of}{c}": f for c, f in TEMP_AND_MS.items()})


@figures("frontier")
def frontier() -> str:
    """A line for each model."""
    head = (
        "loss gradient on an H100: MiB of temporaries / predicted ms",
        "plain",
        "fastest policy",
        "`schedule`, no budget",
        "ratio of ms in the bytes of the policies: mean",
        "largest",
    )
    return table(head, [_line(model) for model in models()])


def _line(model: str) -> list[str]:
    own = {r["policy"]: r for r in rows("frontier") if r["model"] == model}
    found = of_policies(model)
    largest = max(found, key=lambda r: float(r["ratio"]))
    return [
        model,
        _both(own[PLAIN]),
        _both(own[WITHOUT]),
        _both(own[WITHOUT], "schedule: "),
        f"{_mean(found):.2f}",
        f"{float(largest['ratio']):.3f} (`{largest['policy']}`)",
    ]


def _form(fused: bool) -> str:
    found = [r for m in models() if ("fused" in m) == fused for r in of_policies(m)]
    slower = sum(float(r["ratio"]) > 1 for r in found)
    return f"{_mean(found):.2f} over {len(found)} points, of which {slower} are above 1"


figures("frontier, written out")(lambda: _form(False))
figures("frontier, fused")(lambda: _form(True))
