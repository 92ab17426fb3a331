"""Compiles steps of `benchmarks.blocks` for an H100, and keeps XLA's own costs.

    python -m benchmarks.gpu_costs "ViT-L"    # steps that have the word

What is kept in results/ is what `benchmarks.time` and a test hold single kernels to.
"""

import sys

import jax
from jax.experimental import topologies

from benchmarks._xla_costs import COSTS, Costed, keep
from benchmarks.tpu_cycles import step_of
from jaxmem.chips import compiler_folders, get_target, topology, traced_for

CHIP = "h100"
STEPS = (
    ("BERT-Large, 8 x 512", "plain"),
    ("GPT-2 medium, 4 x 1024", "plain"),
    ("Llama-1B blocks, 2 x 2048", "plain"),
    ("ViT-L, 16 x 256", "plain"),
    ("ViT-L, 16 x 256", "nothing_saveable"),
)


def compiled_text(step, args) -> str:
    """The module as XLA leaves it, with what its cost models say of each kernel."""
    asked = topology(CHIP, 1)
    options = {"target_config": asked["config"], "topology": asked["topology"]}
    device = topologies.get_topology_desc(CHIP, "cuda", **options).devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    there = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    with traced_for(get_target(CHIP)):
        lowered = jax.jit(step).lower(*jax.tree.map(there, args))
    costs = {"xla_gpu_collect_cost_model_stats": True}
    return lowered.compile(compiler_options=costs).as_text()


def main(words: list[str]) -> None:
    for model, policy in STEPS:
        name = f"{model}, {policy}"
        if all(word in name for word in words):
            keep(Costed(CHIP, name, compiled_text(*step_of(model, policy))), COSTS)


if __name__ == "__main__":
    sys.path[:0] = compiler_folders()
    main(sys.argv[1:])
