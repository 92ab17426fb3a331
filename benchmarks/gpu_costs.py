"""Compiles steps of `benchmarks.blocks` for an H100, and keeps XLA's own costs.

    python -m benchmarks.gpu_costs "ViT-L"    # steps that have the word

What is kept in results/ is what `benchmarks.time` and a test hold single kernels to.
"""

import sys

from benchmarks.readings.xla_costs import COSTS, Costed, keep
from benchmarks.tpu_cycles import compiled_text, step_of
from jaxmem.chips import compiler_folders

CHIP = "h100"
COUNTED = {"xla_gpu_collect_cost_model_stats": True}  # in the module's text
STEPS = (
    ("BERT-Large, 8 x 512", "plain"),
    ("GPT-2 medium, 4 x 1024", "plain"),
    ("Llama-1B blocks, 2 x 2048", "plain"),
    ("ViT-L, 16 x 256", "plain"),
    ("ViT-L, 16 x 256", "nothing_saveable"),
)


def main(words: list[str]) -> None:
    for model, policy in STEPS:
        name = f"{model}, {policy}"
        if all(word in name for word in words):
            text = compiled_text(*step_of(model, policy), CHIP, **COUNTED)
            keep(Costed(CHIP, name, text), COSTS)


if __name__ == "__main__":
    sys.path[:0] = compiler_folders()
    main(sys.argv[1:])
