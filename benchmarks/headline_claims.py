"""What papers and projects published, and which of our figures stands beside it.

A claim whose figure needs a device that nobody lent has no measure, and says so. Where
the paper's own work is not known to the letter, or cannot be had, `differs` says what
is other in ours.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks import headline_steps as steps
from benchmarks._figures_of import row, rows

Pair = tuple[float, float]
NO_DEVICE = "No step was timed on a GPU or TPU."


@dataclass(frozen=True)
class Measured:
    """Both sides of a row of ours.

    Attributes:
      unit: of both.
      before: as anyone writes it in JAX.
      after: with jaxmem.
      commit: at which they were measured, if not now.
    """

    unit: str
    before: float
    after: float
    commit: str = ""


@dataclass(frozen=True)
class Claim:
    """A published figure, and what we have beside it.

    Attributes:
      source: the paper or project, as people call it.
      link: where the figure stands.
      says: what it is of.
      unit: of the published figures; "%" where only a share was published.
      before: without what the paper proposes.
      after: with it.
      work: what we compile or take instead, with the chip.
      differs: why the two are not, or not wholly, comparable.
      measure: both figures of ours; None: there are none.
      more: whether more is better, as of batches.
    """

    source: str
    link: str
    says: str
    unit: str
    before: float | None
    after: float | None
    work: str
    differs: str = ""
    measure: Callable[[], Measured] | None = None
    more: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.source, self.says

    def gain(self, before: float | None, after: float | None) -> float | None:
        """How many times less, or more where more is better."""
        if before is None or after is None:
            return None
        return after / before if self.more else before / after


def compiled(unit: str, run: Callable[..., Pair], *args) -> Callable[[], Measured]:
    """Both sides by compiling them now."""
    return lambda: Measured(unit, *run(*args))


def of_file(
    unit: str,
    name: str,
    column: str,
    before: Mapping[str, str],
    after: Mapping[str, str],
    after_column: str | None = None,
) -> Callable[[], Measured]:
    """Both sides from a file of results/, which its own command wrote."""

    def measure() -> Measured:
        first, last = row(name, before), row(name, after)
        figures = float(first[column]), float(last[after_column or column])
        return Measured(unit, *figures, last["commit"])

    return measure


def order(column: str) -> Callable[[], Measured]:
    """The mean share of bytes that our order takes, of all steps one after another."""

    def measure() -> Measured:
        found = [r for r in rows("scheduling_order") if r["layers"] == "unrolled"]
        mean = sum(float(r[column]) for r in found) / len(found)
        return Measured("%", 100.0, 100.0 - mean, found[-1]["commit"])

    return measure


def slowest_adama() -> Measured:
    """Of three models on a CPU: the worst ratio of seconds to accumulation's."""
    found = [r for r in rows("cpu") if r["way"] == "4 micro-batches, AdamA"]
    worst = max(found, key=lambda r: float(r["ratio"]))
    return Measured("seconds, ratio", 1.0, float(worst["ratio"]), worst["commit"])


def galore_state(column: str, adam: float) -> Callable[[], Measured]:
    """Bytes a parameter of Llama-7B with 8-bit GaLore, beside Adam's in bfloat16."""

    def measure() -> Measured:
        how = "GaLore, 8-bit, int8 projector, reverse_std, bfloat16"
        found = row("ledger", {"model": "Llama-7B", "optimizer": how})
        return Measured("B/param", adam, float(found[column]), found["commit"])

    return measure


ARXIV = "https://arxiv.org/abs/"
TEMPO, FEWBIT, ADAMA = (ARXIV + n for n in ("2210.10246", "2202.00441", "2305.19982"))
SELECTIVE, APPROX, MESA = (
    ARXIV + n for n in ("2404.12406", "2406.16282", "2111.11124")
)
ROAM, CHECKMATE, GALORE = (
    ARXIV + n for n in ("2310.19295", "1910.02653", "2403.03507")
)
LOMO, CAME, CCE = (ARXIV + n for n in ("2306.09782", "2307.02047", "2411.09009"))
DEEPSPEED = "https://github.com/microsoft/DeepSpeed/pull/812"
LIGER = "https://github.com/linkedin/Liger-Kernel"
CHUNKS = functools.partial(of_file, "MiB", "remat-checkmate")
PUBLISHED = functools.partial(of_file, "GiB", "optimizers_published", "peak GiB")
LLM = {"model": "LLaMA-7B, 8 x 512"}
GPT = {"model": "GPT-2 medium, 1 x 1024"}


def accumulation(variant: str) -> dict[str, str]:
    return {"variant": variant, "N": "8", "target": "h100"}


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


def lora(model: str, work: str) -> Claim:
    """Adapters in every dense layer: plain Flax, and substituted and scheduled."""
    at = {"model": model, "gradients of": "LoRA"}
    peaks = "plain, peak MiB", "scheduled too, peak MiB"
    return Claim(
        *("selective differentiation", SELECTIVE, f"LoRA in {model}"),
        *("", None, None),
        f"rank 16, {work}, peak of an H100: substituted, scheduled",
        "No bytes of LoRA are published there. Full training takes more.",
        of_file("MiB", "frozen_h100", peaks[0], at, at, peaks[1]),
    )


CLAIMS: tuple[Claim, ...] = (
    Claim(
        *("Tempo", TEMPO, "BERT-Large, 512 tokens, 16 GB: the largest batch"),
        *("of plain", 1, 2),
        "BERT-Large with Adam, 512 tokens, 16 GiB of an H100",
        "Plain Flax keeps more than PyTorch does: 7 sequences fit.",
        of_file(
            *("sequences", "batch", "largest batch"),
            *({"step": "plain"}, {"step": "substituted"}),
        ),
        more=True,
    ),
    Claim(
        *("Tempo", TEMPO, "BERT-Large: sequences a second at the largest batch"),
        *("of plain", 1, 1.16),
        *("", NO_DEVICE),
        more=True,
    ),
    Claim(
        *("DeepSpeed", DEEPSPEED, "BERT-Large, flags of the transformer kernel"),
        *("MiB", 30_252, 21_686),
        "BERT-Large with Adam, 16 x 512, peak of an A100, `substitute`",
        "Batch and length are not published; that of jaxmem takes about as many bytes.",
        compiled("MiB", steps.bert_large, 16, "a100"),
    ),
    Claim(
        *("AdamA", ADAMA, "BERT-Large: the peak against gradient accumulation"),
        *("%", 100, 77),
        "8 micro-batches of 8 x 128, peak of an H100, `microbatch` with `adama`",
        "",
        of_file(
            *("MiB", "accumulation", "peak MiB"),
            accumulation("accumulation by hand, Adam"),
            accumulation("microbatch, AdamA"),
        ),
    ),
    Claim(
        *("AdamA", ADAMA, "parameters of the largest model that fits, at the least"),
        *("of plain", 1, 1.26),
        "BERT-Large with more and more layers, 8 micro-batches, 78 GiB of an H100",
        "Theirs are of eight devices with ZeRO, 1.26 to 3.14 times; those of jaxmem "
        "are of one.",
        compiled("million", steps.deepest_models),
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
        *("Few-Bit", FEWBIT, "RoBERTa-base, batch 128: GELU in 3 bits alone"),
        *("GiB", 11.30, 9.75),
        "RoBERTa-base on 128 x 128 tokens, AdamW in float32, peak of an A100",
        "The length is not published.",
        compiled("MiB", steps.gelu_alone),
    ),
    Claim(
        *("Few-Bit", FEWBIT, "RoBERTa-base, batch 128: and linear layers at 20 %"),
        *("GiB", 11.30, 7.60),
        "the same with `SampledDense(budget=0.2)`",
        "The length is not published; rows are chosen where theirs are projected.",
        compiled("MiB", steps.gelu_and_projections),
    ),
    Claim(
        *("Few-Bit", FEWBIT, "RoBERTa-base, batch 128: the same by exact layers"),
        *("GiB", 11.30, 7.60),
        "the same by `substitute` and `schedule`, which approximate nothing",
        "Theirs is approximate.",
        compiled("MiB", steps.exact_roberta),
    ),
    Claim(
        *("selective differentiation", SELECTIVE, "ResNet-101, the input's gradient"),
        *("GB", 7.83, 1.42),
        "64 images of 224 x 224, temporaries of an H100",
        "",
        of_file(
            *("MiB", "frozen_h100", "plain, MiB"),
            *[{"model": "ResNet-101", "gradients of": "input alone"}] * 2,
            "substituted, MiB",
        ),
    ),
    Claim(
        *("selective differentiation", SELECTIVE, "T5-base, norms alone"),
        *("GB", 28.9, 22.8),
        "T5-base on 64 x 256 in float32, peak of an H100: substituted, scheduled",
        "",
        compiled("MiB", steps.t5, steps.norms),
    ),
    Claim(
        *("selective differentiation", SELECTIVE, "T5-base, everything trained"),
        *("GB", 33.4, 31.8),
        "T5-base on 64 x 256 in float32, peak of an H100: substituted, scheduled",
        "",
        compiled("MiB", steps.t5, steps.everything),
    ),
    Claim(
        *("selective differentiation", SELECTIVE, "Mistral-7B, norms alone"),
        *("GB", 36.2, 32.2),
        "32 scanned layers on 16 x 256 in bfloat16, peak of an H100: substituted, "
        "scheduled",
        "",
        compiled("MiB", steps.mistral, steps.norms),
    ),
    Claim(
        *("selective differentiation", SELECTIVE, "Mistral-7B, everything trained"),
        *("GB", 41.7, 37.7),
        "32 scanned layers on 16 x 256 in bfloat16, peak of an H100: substituted, "
        "scheduled",
        "",
        compiled("MiB", steps.mistral, steps.everything),
    ),
    lora("ViT-B/16", "64 images"),
    lora("BERT-base", "16 x 512"),
    lora("Llama 1B, 4 layers", "2 x 2048"),
    Claim(
        *("Approx-BP, MS-BP", APPROX, "fine-tuning: up to this share of the peak"),
        *("%", 100, 70),
        "ViT-B/16, 64 images, AdamW, peak of an A100: `regelu2` and `MSLayerNorm`",
        "Which of their models has 30 % is not in the abstract.",
        compiled("MiB", steps.approximated),
    ),
    Claim(
        *("Mesa", MESA, "DeiT-B, batch 128, 8 bits"),
        *("MB", 17_691, 8_616),
        "ViT-B/16, AdamW, bfloat16, peak of an A100: `substitute(save=8)`, scheduled",
        "",
        compiled("MiB", steps.mesa),
    ),
    Claim(
        *("Mesa", MESA, "DeiT-B, batch 128, by exact layers"),
        *("MB", 17_691, 8_616),
        "the same by `substitute` and `schedule`, which approximate nothing",
        "Theirs is approximate.",
        compiled("MiB", steps.mesa_exact),
    ),
    Claim(
        *("VeLoRA", ARXIV + "2405.17991", "value and down projections by one vector"),
        *("", None, None),
        "Llama-1B's blocks after `substitute`, temporaries of an H100, without and "
        "with `VeLoRADense`",
        "The paper gives losses and sizes of optimizer states, but no bytes of a step.",
        compiled("MiB", steps.velora),
    ),
    Claim(
        *("WTA-CRS", ARXIV + "2305.15265", "fine-tuning, up to, at a budget of 0.3"),
        *("of plain", 2.7, 1),
        "BERT-base on 100 x 128, AdamW in float32, peak of an A100: `SampledDense` "
        "and `substitute(activations=4)`, scheduled",
        "Theirs has LoRA besides.",
        compiled("MiB", steps.winner_take_all),
    ),
    Claim(
        *("nested forward AD", ARXIV + "2209.10778", "a chain of elementwise steps"),
        *("of plain", 1.97, 1),
        "an MLP with a chain of five steps, temporaries of an H100: `elementwise`",
        "Their network is another.",
        of_file(
            *("MiB", "storage", "temp MiB"),
            {"kept": "a chain, plain"},
            {"kept": "the chain by elementwise"},
        ),
    ),
    Claim(
        *("In-place ABN", ARXIV + "1712.02616", "up to this share of what is kept"),
        *("%", 100, 50),
        "ResNet-101 with leaky ReLU, 64 images: what JAX keeps for the gradient",
        "",
        compiled("MiB", steps.inplace_abn_kept),
    ),
    Claim(
        *("In-place ABN", ARXIV + "1712.02616", "the same, compiled"),
        *("%", 100, 50),
        "the same as temporaries of an H100: `InPlaceABN`, scheduled",
        "Without a scan XLA recomputes norms and activations by itself.",
        compiled("MiB", steps.inplace_abn_compiled),
    ),
    Claim(
        *("SHERL", ARXIV + "2407.07523", "late layers and a side network"),
        *("", None, None),
        "BERT-base, 16 x 512, temporaries of an H100: all of it plain, and its late "
        "half substituted and scheduled",
        "Its abstract has no figure, and its side network is no part of the library.",
        compiled("MiB", steps.late_half),
    ),
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
        *("GaLore", GALORE, "8 bits: the optimizer's state"),
        *("%", 100, 17.5),
        "Llama-7B: bytes a parameter of `galore(inner=scale_by_adam(bits=8))`",
        "Adam's two moments in bfloat16 are the plain side.",
        galore_state("moments", 4.0),
    ),
    Claim(
        *("GaLore", GALORE, "8 bits: the whole of training"),
        *("%", 100, 36.7),
        "Llama-7B: weights, gradients and state of one micro-batch, B/param",
        "Without activations; the plain side is AdamW in bfloat16: 2 + 2 + 4.",
        galore_state("device, 1 micro-batch", 8.0),
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
        *("CAME", CAME, "GPT-2 medium, 1 x 1024"),
        *("GB", 8.77, 7.44),
        "the same for an A100: Adam plain, `came` on a substituted model",
        "",
        PUBLISHED(GPT | {"how": "Adam"}, GPT | {"how": "CAME, substituted"}),
    ),
    Claim(
        *("CAME", CAME, "GPT-2 medium, 1 x 1024, the optimizer alone"),
        *("GB", 8.77, 7.44),
        "the same for an A100: Adam plain, `came` plain",
        "",
        PUBLISHED(GPT | {"how": "Adam"}, GPT | {"how": "CAME"}),
    ),
    Claim(
        *("Cut Cross-Entropy", CCE, "Gemma-2 2B's head, 8,192 tokens"),
        *("MB", 28_000, 1_164),
        "the same, loss and gradients, for an A100: `linear_cross_entropy`",
        "jaxmem adds up the gradient of the kernel in float32, theirs in bfloat16.",
        compiled("MB", steps.gemma_head),
    ),
    Claim(
        *("Liger", LIGER, "LLaMA-3-8B on 8 A100, FSDP, layers checkpointed"),
        *("%", 100, 40),
        "the same in bfloat16, 8 x 2,048 tokens a device, peak of an A100: layers "
        "substituted, `schedule` with a budget of 55 %",
        "The length is not published for this figure. What is left is the state and "
        "one input a layer, which checkpoints keep in JAX as in PyTorch.",
        compiled("MiB", steps.liger),
    ),
    Claim(
        *("Liger", LIGER, "LLaMA-3-8B on 8 A100: tokens a second"),
        *("of plain", 1, 1.2),
        *("", NO_DEVICE),
        more=True,
    ),
    Claim(
        *("FlashOptim", ARXIV + "2602.23349", "Llama-3.1-8B, AdamW in 8 bits"),
        *("GiB", 175.2, 112.9),
        "1 x 2,048 tokens, layers checkpointed, peak of a B200: "
        "`split_master(adamw(bits=8))`, scheduled",
        "Batch and length are not published; theirs keeps more activations.",
        compiled("GiB", steps.flash_optim),
    ),
    Claim(
        *("Memformer", ARXIV + "2010.06891", "replay through time: constant memory"),
        *("", None, None),
        "an LSTM over 4,096 steps with Adam, peak of an H100: "
        "`schedule(step, '620MiB')`",
        "The paper gives a curve over time, and no bytes.",
        compiled("MiB", steps.replay),
    ),
)
