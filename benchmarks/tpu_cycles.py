"""Compiles the steps of `benchmarks.blocks` for TPUs, and keeps XLA's own cycles.

    python -m benchmarks.tpu_cycles tpu-v5e "ViT-L"    # steps that have both words

What is kept in results/ is what `benchmarks.time` and a test hold predicted seconds to.
"""

import sys
from collections.abc import Iterator

import jax

import jaxmem
from benchmarks import blocks
from benchmarks.readings.xla_costs import CYCLES, Costed, keep
from jaxmem.chips import CHIPS, compiler_folders, get_target, topology, traced_for
from jaxmem.memory.compile.worker_compile import devices_for

CHOSEN = ("tpu-v5e", "tpu-v5p", "tpu-v6e")
MODELS = ("BERT-Large, 8 x 512", "GPT-2 medium, 4 x 1024", "ViT-L, 16 x 256")
SUBSTITUTE = "substitute"


def step_of(model: str, policy: str) -> tuple:
    """(step, arguments) of a model under a policy, or substituted."""
    gradient, module = blocks.made(model, blocks.POLICIES.get(policy))
    return gradient(jaxmem.substitute(module) if policy == SUBSTITUTE else module)


def compiled_text(step, args, chip: str, **options) -> str:
    """The module as the compiler leaves it at the end, with what it says of costs."""
    place = jax.sharding.SingleDeviceSharding(devices_for(topology(chip, 1))[0])
    there = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    with traced_for(get_target(chip)):
        lowered = jax.jit(step).lower(*jax.tree.map(there, args))
    return lowered.compile(compiler_options=options or None).as_text()


def cases() -> Iterator[tuple[str, str, str]]:
    """(chip, model, policy)."""
    for chip in CHOSEN:
        for model in MODELS:
            for policy in (*blocks.POLICIES, SUBSTITUTE):
                yield chip, model, policy


def main(words: list[str]) -> None:
    for chip, model, policy in cases():
        name = f"{model}, {policy}"
        if all(word in f"{chip} {name}" for word in words):
            step, args = step_of(model, policy)
            memory = f"{CHIPS[chip].memory_bytes:,} bytes"
            try:
                keep(Costed(chip, name, compiled_text(step, args, chip)), CYCLES)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                print(f"{chip}: {name} does not fit in {memory}")


if __name__ == "__main__":
    sys.path[:0] = compiler_folders()
    main(sys.argv[1:])
