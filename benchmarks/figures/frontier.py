"""The figures of docs/frontier.md: `schedule` in the bytes of every policy."""

import functools
import statistics
from collections.abc import Iterable, Iterator, Mapping

from benchmarks._pictures import IMAGES, of_model
from benchmarks.figures.rows import (
    TEMP_AND_MS,
    Row,
    figures,
    rows,
    table,
    with_older,
)
from benchmarks.models.named import OFFLOADED

WITHOUT, PLAIN = "no budget", "plain"


def of_policies(model: str) -> list[Row]:
    """Rows of what recomputes on the device, with ours in as many bytes."""
    found = [r for r in rows("frontier") if r["model"] == model and r["ratio"]]
    return [r for r in found if r["policy"] not in (WITHOUT, PLAIN, *OFFLOADED)]


def models() -> list[str]:
    return list(dict.fromkeys(r["model"] for r in rows("frontier")))


def images(folder: str, names: Iterable[str]) -> Iterator[str]:
    """The pictures of models, by the page of docs/ that shows them."""
    for name in names:
        path = of_model(IMAGES / folder, name).relative_to(IMAGES.parent)
        yield f"![Predicted time over bytes: {name}]({path.as_posix()})"


def _ratio(r: Row) -> float:
    """To three places; the file's older rows have two."""
    ours, theirs = (float(r[f"{of}predicted ms"]) for of in ("schedule: ", ""))
    return round(ours / theirs, 3)


def _mean(found: list[Row]) -> float:
    return statistics.geometric_mean(map(_ratio, found))


def _both(r: Row, of: str = "", columns: Mapping[str, str] = TEMP_AND_MS) -> str:
    return with_older(r, r, {f"{of}{c}": f for c, f in columns.items()})


@figures("frontier, pictures")
def pictures() -> str:
    """An image for each model."""
    return "\n".join(images("frontier", models()))


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
    ours = _both(own[WITHOUT], "schedule: ")
    line = [model, _both(own[PLAIN]), _both(own[WITHOUT]), ours]
    found = of_policies(model)
    largest = max(found, key=_ratio)
    return [
        *line,
        f"{_mean(found):.2f}",
        f"{_ratio(largest):.3f} (`{largest['policy']}`)",
    ]


NAMED = "save_qkv_proj"  # a policy that models have whose products have names


def _form(model: str) -> str:
    """How a model is written, as the page groups them."""
    if all(r["policy"] != NAMED for r in rows("frontier") if r["model"] == model):
        return "blocks"
    return "fused" if "fused" in model else "plain attention"


def _summary(form: str) -> str:
    found = [r for m in models() if _form(m) == form for r in of_policies(m)]
    slower = sum(_ratio(r) > 1 for r in found)
    return f"{_mean(found):.2f} over {len(found)} points, of which {slower} are above 1"


@figures("frontier, offload")
def offload() -> str:
    """A line for each model and policy that sends arrays to the host's memory."""
    head = "model", "policy", "the policy: MiB / predicted ms", "`schedule`", "ratio"
    found = [r for r in rows("frontier") if r["policy"] in OFFLOADED and r["ratio"]]
    cells = lambda r: [_both(r), _both(r, "schedule: "), f"{_ratio(r):.3f}"]
    return table(head, [[r["model"], f"`{r['policy']}`", *cells(r)] for r in found])


@figures("frontier, tpu")
def on_tpu() -> str:
    """A line for each model and policy that fits the chip."""
    sizes = {"temp MiB": ",.0f", "ms by cycles": ",.1f"}
    both = functools.partial(_both, columns=sizes)
    head = "model", "policy", "the policy: MiB / ms", "`schedule`", "ratio"
    fits = [r for r in rows("frontier_tpu") if r["ms by cycles"]]
    found = [r for r in fits if r["policy"] != PLAIN]
    # without a ratio a cell says why there is nothing in so many bytes
    ours = lambda r: both(r, "schedule: ") if r["ratio"] else r["schedule: temp MiB"]
    cells = lambda r: [both(r), ours(r), r["ratio"]]
    return table(head, [[r["model"], f"`{r['policy']}`", *cells(r)] for r in found])


@figures("throughput")
def throughput() -> str:
    """A line for each model, room and way, at its best batch."""
    sizes = "predicted ms", "examples a second"
    head = *("model", "memory", "step", "batch"), *sizes, "ratio"
    cells = lambda r: [r["batch"], *(f"{float(r[c]):,.1f}" for c in sizes)]
    way = lambda r: [r["model"], r["memory"], f"`{r['step']}`", *cells(r)]
    found = rows("throughput")
    return table(head, [[*way(r), r["of the best policy's"]] for r in found])


figures("frontier, plain attention")(lambda: _summary("plain attention"))
figures("frontier, fused")(lambda: _summary("fused"))
figures("frontier, blocks")(lambda: _summary("blocks"))
