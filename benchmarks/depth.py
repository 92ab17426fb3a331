"""What deep models take at least: an input for each layer, or segments of layers.

    python -m benchmarks.depth

The loss gradient of GPT-2 medium's blocks, 1 x 1024, with more and more layers,
compiled for an H100; the gradients are outputs and not counted. "a layer" computes each
layer anew from its own input (the last candidate), "segments" is the least
that `jaxmem.schedule` reaches, with the layers in a segment and in those inside of it.
"predicted ms" is `report.seconds`; recomputation is in per cent of the forward pass's
matmul flops.
"""

import dataclasses

import jaxmem
from benchmarks._common import publish, size_and_ms
from benchmarks.blocks import TARGET, gradient_of_stack, matmul_flops
from benchmarks.models.transformers import GPT2_MEDIUM, PreLNLayer, Stack
from benchmarks.offload import least
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.recompute.segments_rewrite import InSegments

DEPTHS = (12, 24, 48, 96, 192)
COLUMNS = (
    *("layers", "plain MiB", "plain: predicted ms"),
    *("a layer: MiB", "a layer: predicted ms", "a layer: recomputes %"),
    *("segments: MiB", "segments: predicted ms", "segments: recomputes %"),
    "layers in one",
)


def row(layers: int):
    model = Stack(dataclasses.replace(GPT2_MEDIUM, layers=layers), PreLNLayer)
    step, args = gradient_of_stack(model, (1, 1024))
    plan = least(step, args, offload=False)
    lowest = plan.choice.having(Recompute(1e-3), InSegments())
    lowest = dataclasses.replace(plan, choice=lowest)
    flat = jaxmem.schedule(step, plan=lowest, donate_argnums=())
    flat = flat.plan(*args, target=TARGET)
    forward = matmul_flops(step, *args) / 3
    cells = [
        (*size_and_ms(p.scheduled), 100 * p.recomputed_flops / forward)
        for p in (flat, plan)
    ]
    sizes = " / ".join(map(str, plan.choice.get(InSegments).sizes))
    return layers, *size_and_ms(plan.plain), *cells[0], *cells[1], sizes


if __name__ == "__main__":
    publish("depth", COLUMNS, [row(layers) for layers in DEPTHS])
