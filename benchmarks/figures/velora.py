"""The figures of docs/sampled_linear.md: VeLoRA by where its vector comes from."""

from functools import partial

from benchmarks.figures.rows import Row, figures, rows, table, value

SEEDS = range(3)
GROUPS = ("16", "4")


@figures("sampled, velora")
def velora_training() -> str:
    titles = {
        "plain": "plain",
        "frozen": "kernels of the MLPs frozen",
        "init": "a batch of zeros",
        "average": '`"average"`, the first batch',
        "ema": '`"ema"`, all batches',
        "svd": '`"svd"`, the first batch',
    }
    lines = [
        (titles[r["vector"]], r["groups"], r["mean"], *cosines(r))
        for r in rows("velora")
    ]
    head = ("vector", "groups", "loss", "cosine, first step", "last step")
    return table(head, lines)


def cosines(r: Row) -> tuple[str, ...]:
    """None where no kernel is trained."""
    both = r["cosine, first"], r["cosine, last"]
    return ("", "") if r["vector"] == "frozen" else both


def loss(vector: str, groups: str = "") -> float:
    return value("velora", "mean", {"vector": vector, "groups": groups})


@figures("velora, vectors")
def vectors_apart() -> str:
    """The most that means differ by, of one number of groups."""
    losses = {groups: [] for groups in GROUPS}
    for r in rows("velora"):
        if r["groups"]:
            losses[r["groups"]].append(float(r["mean"]))
    return f"{max(max(x) - min(x) for x in losses.values()):.4f}"


@figures("velora, seeds")
def seeds_apart() -> str:
    """The most that seeds of one case differ by."""
    seeds = [[float(r[f"seed {n}"]) for n in SEEDS] for r in rows("velora")]
    return f"{max(max(x) - min(x) for x in seeds):.4f}"


@figures("velora, worth")
def worth() -> str:
    """What training the kernels exactly gains."""
    return f"{loss('frozen') - loss('plain'):.4f}"


def change(groups: str) -> str:
    """Of the loss, by training with the first batch's vector instead of not at all."""
    return f"{loss('average', groups) - loss('frozen'):+.4f}"


for _groups in GROUPS:
    figures(f"velora, change, {_groups}")(partial(change, _groups))
