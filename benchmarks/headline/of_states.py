"""Claims of gradients, moments and weights that take less."""

import functools
from collections.abc import Callable

from benchmarks.figures.rows import row, rows
from benchmarks.headline import language_models
from benchmarks.headline.claim import (
    ARXIV,
    BOTH_MS,
    Claim,
    Measured,
    compiled,
    of_file,
)

ADAMA = ARXIV + "2305.19982"
GALORE = ARXIV + "2403.03507"
LOMO = ARXIV + "2306.09782"
CAME = ARXIV + "2307.02047"
PUBLISHED = functools.partial(of_file, "GiB", "optimizers_published", "peak GiB")
LLM = {"model": "LLaMA-7B, 8 x 512"}
GPT = {"model": "GPT-2 medium, 1 x 1024"}


def slowest_adama() -> Measured:
    """Of three models on a CPU: the worst ratio of seconds to accumulation's."""
    found = [r for r in rows("cpu") if r["way"] == "4 micro-batches, AdamA"]
    worst = max(found, key=lambda r: float(r["ratio"]))
    return Measured("seconds, ratio", 1.0, float(worst["ratio"]), worst["commit"])


SMALLEST = "GaLore, 8-bit, int8 projector, reverse_std, bfloat16"
THEIRS = "GaLore, 8-bit, bfloat16 projector, bfloat16"
# the call that a scheme of the ledger is
CALLS = {
    SMALLEST: '`galore(inner=scale_by_adam(bits=8), projector_dtype="int8", '
    'projection="reverse_std")`',
    THEIRS: "`galore.paper()`",
}


def galore_state(how: str, column: str, adam: float) -> Callable[[], Measured]:
    """Bytes a parameter of Llama-7B with 8-bit GaLore, beside Adam's in bfloat16."""

    def measure() -> Measured:
        found = row("ledger", {"model": "Llama-7B", "optimizer": how})
        return Measured("B/param", adam, float(found[column]), found["commit"])

    return measure


def accumulation(variant: str) -> dict[str, str]:
    return {"variant": variant, "N": "8", "target": "h100"}


STATES: tuple[Claim, ...] = (
    Claim(
        *("AdamA", ADAMA, "BERT-Large: the peak against gradient accumulation"),
        *("%", 100, 77),
        "8 micro-batches of 8 x 128, peak of an H100, `microbatch` with `adama`",
        "",
        of_file(
            *("MiB", "accumulation", "peak MiB"),
            accumulation("accumulation by hand, Adam"),
            accumulation("microbatch, AdamA"),
            ms=BOTH_MS,
        ),
    ),
    Claim(
        *("AdamA", ADAMA, "parameters of the largest model that fits, at the least"),
        *("of plain", 1, 1.26),
        "BERT-Large with more and more layers, 8 micro-batches, 78 GiB of an H100",
        "Theirs are of eight devices with ZeRO, 1.26 to 3.14 times; those of jaxmem "
        "are of one.",
        compiled("million", language_models.deepest_models),
        more=True,
    ),
    Claim(
        *("AdamA", ADAMA, "seconds of a step against accumulation, at most"),
        *("of plain", 1, 1.02),
        "the worst of three small models on a CPU with two cores",
        "On a CPU, where bytes that are not moved save time.",
        slowest_adama,
    ),
    Claim(
        *("GaLore", GALORE, "8 bits: the optimizer's state"),
        *("%", 100, 17.5),
        f"Llama-7B: bytes a parameter of {CALLS[SMALLEST]}",
        "Adam's two moments in bfloat16 are the plain side. A projector in 8 bits on "
        "the longer side of a matrix is not the paper's rule: see the next row.",
        galore_state(SMALLEST, "moments", 4.0),
    ),
    Claim(
        *("GaLore", GALORE, "8 bits: the optimizer's state, by the paper's rule"),
        *("%", 100, 17.5),
        f"Llama-7B: bytes a parameter of {CALLS[THEIRS]}",
        "The projector is of the type of the gradients, on the shorter side.",
        galore_state(THEIRS, "moments", 4.0),
    ),
    Claim(
        *("GaLore", GALORE, "8 bits: the whole of training"),
        *("%", 100, 36.7),
        "Llama-7B: weights, gradients and state of one micro-batch with "
        f"{CALLS[SMALLEST]}, B/param",
        "Without activations; the plain side is AdamW in bfloat16: 2 + 2 + 4.",
        galore_state(SMALLEST, "device, 1 micro-batch", 8.0),
    ),
    Claim(
        *("GaLore", GALORE, "8 bits: the whole of training, by the paper's rule"),
        *("%", 100, 36.7),
        f"the same with {CALLS[THEIRS]}",
        "",
        galore_state(THEIRS, "device, 1 micro-batch", 8.0),
    ),
    Claim(
        *("LOMO", LOMO, "LLaMA-7B, 8 x 512"),
        *("GB", 147.02, 59.40),
        "the same: AdamW for a B200, `lomo` scheduled for an H100",
        "",
        PUBLISHED(
            LLM | {"how": "AdamW"}, LLM | {"how": "LOMO, scheduled", "target": "h100"}
        ),
    ),
    Claim(
        *("LOMO", LOMO, "LLaMA-7B, 8 x 512, a checkpoint a layer"),
        *("GB", 102.20, 14.58),
        "the same: AdamW for a B200, `lomo` scheduled and substituted for an H100",
        "",
        PUBLISHED(
            LLM | {"how": "AdamW, a checkpoint a layer"},
            LLM | {"how": "LOMO, a checkpoint a layer, substituted, scheduled"},
        ),
    ),
    Claim(
        *("CAME", CAME, "GPT-2 medium, 1 x 1024, on a substituted model"),
        *("GB", 8.77, 7.44),
        "the same for an A100: Adam plain, `came` on a substituted model",
        "The published figure is of the optimizer alone, as the next row is.",
        PUBLISHED(
            GPT | {"how": "Adam"}, GPT | {"how": "CAME, substituted"}, ms=BOTH_MS
        ),
    ),
    Claim(
        *("CAME", CAME, "GPT-2 medium, 1 x 1024, the optimizer alone"),
        *("GB", 8.77, 7.44),
        "the same for an A100: Adam plain, `came` plain",
        "",
        PUBLISHED(GPT | {"how": "Adam"}, GPT | {"how": "CAME"}, ms=BOTH_MS),
    ),
    Claim(
        *("FlashOptim", ARXIV + "2602.23349", "Llama-3.1-8B, AdamW in 8 bits"),
        *("GiB", 175.2, 112.9),
        "1 x 2,048 tokens, layers checkpointed, peak of a B200: "
        "`split_master(adamw(bits=8))`, scheduled",
        "Batch and length are not published; theirs keeps more activations.",
        compiled("GiB", language_models.flash_optim),
    ),
)
