"""What a graph says of a step's peak, beside what the compilers say.

    python -m benchmarks.predict                 # every step
    python -m benchmarks.predict alexnet dense   # those with such a name; others stay

`jaxmem.scheduling.predict` compiles nothing: its figure is that of the order that XLA
is expected to take, without copies, padding and workspaces. "off" is of the peak,
arguments and outputs included.
"""

import sys

import jaxmem
from benchmarks import zoo
from benchmarks._common import MIB, TARGETS, publish, published
from benchmarks.blocks import made
from benchmarks.latency_hiding import scanned_step
from benchmarks.release import dense_step
from jaxmem.memory._pool import DoesNotFit
from jaxmem.scheduling import predict

COLUMNS = ("step", "target", "predicted MiB", "compiled MiB", "off %")


def gradient_of(name: str, policy=None):
    gradient, model = made(name, policy)
    return *gradient(model), ()


STEPS = {
    "dense, 16 x 4096, unrolled, Adam": lambda: (*dense_step(), (0, 1)),
    "dense, 16 x 2048, scanned, Adam": lambda: (*scanned_step(), (0, 1)),
    "BERT-Large, 8 x 512, scanned": lambda: gradient_of("BERT-Large, 8 x 512"),
    "GPT-2 medium, 4 x 1024, scanned": lambda: gradient_of("GPT-2 medium, 4 x 1024"),
    "ViT-L, 16 x 256, scanned": lambda: gradient_of("ViT-L, 16 x 256"),
    "alexnet, 1, unrolled, Adam": lambda: zoo.step("alexnet", 1),
    "alexnet, 32, unrolled, Adam": lambda: zoo.step("alexnet", 32),
    "vgg16, 1, unrolled, Adam": lambda: zoo.step("vgg16", 1),
    "gpt2_small, 1, scanned, Adam": lambda: zoo.step("gpt2_small", 1, True),
}
PATIENCE = 1800  # seconds: a compile for TPU takes minutes


def row(name: str, target: str):
    step, args, donated = STEPS[name]()
    found = predict(step, *args, donate_argnums=donated).peak_bytes
    how = {"target": target, "donate_argnums": donated, "timeout": PATIENCE}
    try:
        peak = jaxmem.estimate(step, *args, **how).peak_bytes
    except DoesNotFit:
        return name, target, found / MIB, "does not fit", ""
    return name, target, found / MIB, peak / MIB, 100 * (found / peak - 1)


def main() -> None:
    chosen = [n for n in STEPS if not sys.argv[1:] or any(w in n for w in sys.argv[1:])]
    rows = {(r[0], r[1]): r for r in published("predict")}
    for target in TARGETS:
        for name in chosen:
            rows[name, target] = row(name, target)
            print(*rows[name, target], flush=True)
    sys.argv[1:] = []  # the file is that of the whole table
    publish("predict", COLUMNS, [*rows.values()])


if __name__ == "__main__":
    main()
