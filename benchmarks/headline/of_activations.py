"""Claims of layers that keep less for the backward pass."""

from benchmarks.headline import classifiers, inplace_abn, language_models, parts
from benchmarks.headline.claim import (
    ARXIV,
    BOTH_MS,
    NO_DEVICE,
    Claim,
    compiled,
    of_file,
)

TEMPO = ARXIV + "2210.10246"
FEWBIT = ARXIV + "2202.00441"
APPROX = ARXIV + "2406.16282"
MESA = ARXIV + "2111.11124"
DEEPSPEED = "https://github.com/microsoft/DeepSpeed/pull/812"


ACTIVATIONS: tuple[Claim, ...] = (
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
        compiled("MiB", language_models.bert_large, 16, "a100"),
    ),
    Claim(
        *("Few-Bit", FEWBIT, "RoBERTa-base, batch 128: GELU in 3 bits alone"),
        *("GiB", 11.30, 9.75),
        "RoBERTa-base on 128 x 128 tokens, AdamW in float32, peak of an A100",
        "The length is not published.",
        compiled("MiB", classifiers.gelu_alone),
    ),
    Claim(
        *("Few-Bit", FEWBIT, "RoBERTa-base, batch 128: and linear layers at 20 %"),
        *("GiB", 11.30, 7.60),
        "the same with `SampledDense(budget=0.2)`",
        "The length is not published; rows are chosen where theirs are projected.",
        compiled("MiB", classifiers.gelu_and_projections),
    ),
    Claim(
        *("Few-Bit", FEWBIT, "RoBERTa-base, batch 128: the same by exact layers"),
        *("GiB", 11.30, 7.60),
        "the same by `substitute` and `schedule`, which approximate nothing",
        "Theirs is approximate.",
        compiled("MiB", classifiers.exact_roberta),
    ),
    Claim(
        *("Approx-BP, MS-BP", APPROX, "fine-tuning: up to this share of the peak"),
        *("%", 100, 70),
        "ViT-B/16, 64 images, AdamW, peak of an A100: `regelu2` and `MSLayerNorm`, "
        "scheduled",
        "Which of their models has 30 % is not in the abstract.",
        compiled("MiB", classifiers.approximated),
    ),
    Claim(
        *("Mesa", MESA, "DeiT-B, batch 128, 8 bits"),
        *("MB", 17_691, 8_616),
        "ViT-B/16, AdamW, bfloat16, peak of an A100: `substitute(save=8)`, scheduled",
        "",
        compiled("MiB", classifiers.mesa),
    ),
    Claim(
        *("Mesa", MESA, "DeiT-B, batch 128, by exact layers"),
        *("MB", 17_691, 8_616),
        "the same by `substitute` and `schedule`, which approximate nothing",
        "Theirs is approximate.",
        compiled("MiB", classifiers.mesa_exact),
    ),
    Claim(
        *("VeLoRA", ARXIV + "2405.17991", "value and down projections by one vector"),
        *("", None, None),
        "Llama-1B's blocks after `substitute`, temporaries of an H100, without and "
        "with `VeLoRADense`",
        "The paper gives losses and sizes of optimizer states, but no bytes of a step.",
        compiled("MiB", parts.velora),
    ),
    Claim(
        *("WTA-CRS", ARXIV + "2305.15265", "fine-tuning, up to, at a budget of 0.3"),
        *("of plain", 2.7, 1),
        "BERT-base on 100 x 128, AdamW in float32, peak of an A100: `SampledDense` "
        "and `substitute(activations=4)`, scheduled",
        "Theirs has LoRA besides.",
        compiled("MiB", classifiers.winner_take_all),
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
            ms=BOTH_MS,
        ),
    ),
    Claim(
        *("In-place ABN", ARXIV + "1712.02616", "up to this share of what is kept"),
        *("%", 100, 50),
        "ResNet-101 with leaky ReLU, 64 images: what JAX keeps for the gradient",
        "",
        compiled("MiB", inplace_abn.inplace_abn_kept),
    ),
    Claim(
        *("In-place ABN", ARXIV + "1712.02616", "the same, compiled"),
        *("%", 100, 50),
        "the same as temporaries of an H100: `InPlaceABN`, scheduled",
        "Without a scan XLA recomputes norms and activations by itself.",
        compiled("MiB", inplace_abn.inplace_abn_compiled),
    ),
)
