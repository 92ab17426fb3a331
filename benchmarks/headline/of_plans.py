"""Claims of orders, recomputation and tiles of a whole step."""

from collections.abc import Callable

from benchmarks.figures.rows import rows
from benchmarks.headline import language_models, replay
from benchmarks.headline.claim import (
    ARXIV,
    NO_DEVICE,
    Claim,
    Measured,
    compiled,
    of_file,
)

ROAM = ARXIV + "2310.19295"
CHECKMATE = ARXIV + "1910.02653"
CCE = ARXIV + "2411.09009"
LIGER = "https://github.com/linkedin/Liger-Kernel"


def order(column: str) -> Callable[[], Measured]:
    """The mean share of bytes that our order takes, of all steps one after another."""

    def measure() -> Measured:
        found = [r for r in rows("scheduling_order") if r["layers"] == "unrolled"]
        mean = sum(float(r[column]) for r in found) / len(found)
        return Measured("%", 100.0, 100.0 - mean, found[-1]["commit"])

    return measure


def checkmate(network: str, before: float, after: float, differs: str = "") -> Claim:
    at = {"network": network}
    return Claim(
        *("Checkmate", CHECKMATE, f"{network}: the largest batch in 16 GB"),
        *("images", before, after),
        "`jaxmem.planning.remat` on the same graph, one forward pass again at most",
        differs,
        of_file(
            "images",
            "remat-checkmate",
            "batch, parameters off twice",
            at | {"strategy": "keep all"},
            at | {"strategy": "frontier"},
            "batch, off once",
        ),
        more=True,
    )


PLANS: tuple[Claim, ...] = (
    Claim(
        *("ROAM", ROAM, "the peak against the order of the program"),
        *("%", 100, 64.3),
        "34 unrolled steps of 17 models, mean, not compiled",
        "Bounds leave no more: most of these orders are the best there are.",
        order("below program %"),
    ),
    Claim(
        *("ROAM", ROAM, "the peak against heuristics"),
        *("%", 100, 86.7),
        "34 unrolled steps of 17 models, mean, not compiled",
        "Against the best of three heuristics for each, which is more than LESCEA.",
        order("below best greedy %"),
    ),
    Claim(
        *("ROAM", ROAM, "the peak against MODeL"),
        *("%", 100, 72.8),
        *("", "MODeL is an integer program for PyTorch that needs Gurobi: not run."),
    ),
    Claim(
        *("ROAM", ROAM, "seconds of planning against MODeL"),
        *("of MODeL", 53.7, 1),
        *("", "MODeL needs Gurobi: not run. Our longest search takes 34 s."),
    ),
    checkmate("VGG19", 167, 289),
    checkmate("MobileNet", 215, 1105, "Its own search ran for two days."),
    checkmate("ResNet50", 98, 193, "Its own search ran for two days."),
    checkmate("U-Net", 22, 57),
    Claim(
        *("Cut Cross-Entropy", CCE, "Gemma-2 2B's head, 8,192 tokens"),
        *("MB", 28_000, 1_164),
        "the same, loss and gradients, for an A100: `linear_cross_entropy`",
        "jaxmem adds up the gradient of the kernel in float32, theirs in bfloat16.",
        compiled("MB", language_models.gemma_head),
    ),
    Claim(
        *("Liger", LIGER, "LLaMA-3-8B on 8 A100, FSDP, layers checkpointed"),
        *("%", 100, 40),
        "the same in bfloat16, 8 x 2,048 tokens a device, peak of an A100: layers "
        "substituted, `schedule` with a budget of 55 %",
        "The length is not published for this figure. What is left is the state and "
        "one input a layer, which checkpoints keep in JAX as in PyTorch.",
        compiled("MiB", language_models.liger),
    ),
    Claim(
        *("Liger", LIGER, "LLaMA-3-8B on 8 A100: tokens a second"),
        *("of plain", 1, 1.2),
        *("", NO_DEVICE),
        more=True,
    ),
    Claim(
        *("Memformer", ARXIV + "2010.06891", "replay through time: constant memory"),
        *("", None, None),
        "an LSTM over 4,096 steps with Adam, peak of an H100: "
        "`schedule(step, '620MiB')`",
        "The paper gives a curve over time, and no bytes.",
        compiled("MiB", replay.replay),
    ),
)
