"""Claims of gradients of a part of the parameters."""

from benchmarks._common import MS
from benchmarks.headline import parts
from benchmarks.headline.claim import (
    ARXIV,
    Claim,
    compiled,
    of_file,
)

SELECTIVE = ARXIV + "2404.12406"


def lora(model: str, work: str) -> Claim:
    """Adapters in every dense layer: plain Flax, and substituted and scheduled."""
    at = {"model": model, "gradients of": "LoRA"}
    peaks = "plain, peak MiB", "scheduled too, peak MiB"
    ms = f"plain: {MS}", f"scheduled too: {MS}"
    return Claim(
        *("selective differentiation", SELECTIVE, f"LoRA in {model}"),
        *("", None, None),
        f"rank 16, {work}, peak of an H100: substituted, scheduled",
        "No bytes of LoRA are published there. Full training takes more.",
        of_file("MiB", "frozen_h100", peaks[0], at, at, peaks[1], ms=ms),
    )


PARTS: tuple[Claim, ...] = (
    Claim(
        *("selective differentiation", SELECTIVE, "ResNet-101, the input's gradient"),
        *("GB", 7.83, 1.42),
        "64 images of 224 x 224, temporaries of an H100",
        "",
        of_file(
            *("MiB", "frozen_h100", "plain, MiB"),
            *[{"model": "ResNet-101", "gradients of": "input alone"}] * 2,
            "substituted, MiB",
            ms=(f"plain: {MS}", f"substituted: {MS}"),
        ),
    ),
    Claim(
        *("selective differentiation", SELECTIVE, "T5-base, norms alone"),
        *("GB", 28.9, 22.8),
        "T5-base on 64 x 256 in float32, peak of an H100: `substitute`",
        "",
        compiled("MiB", parts.t5, parts.norms),
    ),
    Claim(
        *("selective differentiation", SELECTIVE, "T5-base, everything trained"),
        *("GB", 33.4, 31.8),
        "T5-base on 64 x 256 in float32, peak of an H100: `substitute`",
        "",
        compiled("MiB", parts.t5, parts.everything),
    ),
    Claim(
        *("selective differentiation", SELECTIVE, "Mistral-7B, norms alone"),
        *("GB", 36.2, 32.2),
        "32 scanned layers on 16 x 256 in bfloat16, peak of an H100: `substitute`",
        "",
        compiled("MiB", parts.mistral, parts.norms),
    ),
    Claim(
        *("selective differentiation", SELECTIVE, "Mistral-7B, everything trained"),
        *("GB", 41.7, 37.7),
        "32 scanned layers on 16 x 256 in bfloat16, peak of an H100: `substitute`",
        "",
        compiled("MiB", parts.mistral, parts.everything),
    ),
    lora("ViT-B/16", "64 images"),
    lora("BERT-base", "16 x 512"),
    lora("Llama 1B, 4 layers", "2 x 2048"),
    Claim(
        *("SHERL", ARXIV + "2407.07523", "late layers, of merged early ones"),
        *("", None, None),
        "BERT-base, 16 x 512, temporaries of an H100: all of it plain, and its late "
        "half with a `MultiTierAdapter` of the early six layers, substituted and "
        "scheduled",
        "Its abstract has no figure.",
        compiled("MiB", parts.late_half),
    ),
)
