"""What a graph says of a step's peak, beside what the compilers say.

    python -m benchmarks.predict                 # every step, for every target
    python -m benchmarks.predict alexnet h100    # those with such a name; others stay

`jaxmem.scheduling.predict` compiles nothing: its figure is that of the order that XLA
is expected to take, without copies, padding and workspaces. "off" is of the peak,
arguments and outputs included.
"""

import functools
import sys
from collections.abc import Callable, Iterator

import jaxmem
from benchmarks import zoo
from benchmarks._common import MIB, TARGETS, as_a_whole, publish, published, write
from benchmarks.blocks import made
from benchmarks.latency_hiding import scanned_step
from benchmarks.release import dense_step
from jaxmem.memory._pool import CompileError, DoesNotFit
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
}
WRITTEN_OUT = ("vit_b", "bert_base", "gpt2_small")  # of those with layers
PATIENCE = 1800  # seconds: a compile for TPU takes minutes


def of_the_zoo() -> Iterator[tuple[str, Callable]]:
    """Its steps with Adam: nets without layers at both batches, others at 1."""
    for name, entry in zoo.ZOO.items():
        ways = [(1, False), (32, False)]
        if entry.layered:
            ways = [(1, False), (1, True)] if name in WRITTEN_OUT else [(1, True)]
        for batch, scanned in ways:
            how = "scanned" if scanned else "unrolled"
            make = functools.partial(zoo.step, name, batch, scanned)
            yield f"{name}, {batch}, {how}, Adam", make


STEPS |= dict(of_the_zoo())


def row(name: str, target: str):
    step, args, donated = STEPS[name]()
    found = predict(step, *args, donate_argnums=donated).peak_bytes
    how = {"target": target, "donate_argnums": donated, "timeout": PATIENCE}
    try:
        peak = jaxmem.estimate(step, *args, **how).peak_bytes
    except DoesNotFit:
        return name, target, found / MIB, "does not fit", ""
    except CompileError as error:  # XLA itself refuses some of these
        print(name, target, str(error)[:200])
        return name, target, found / MIB, "does not compile", ""
    return name, target, found / MIB, peak / MIB, 100 * (found / peak - 1)


def main() -> None:
    words = [w for w in sys.argv[1:] if w not in TARGETS]
    targets = [t for t in TARGETS if t in sys.argv] or TARGETS
    chosen = [n for n in STEPS if not words or any(w in n for w in words)]
    as_a_whole()
    rows = {(r[0], r[1]): r for r in published("predict")}
    for target in targets:
        for name in chosen:
            rows[name, target] = row(name, target)
            print(*rows[name, target], flush=True)
            write("predict", COLUMNS, [*rows.values()])
    publish("predict", COLUMNS, [*rows.values()])


if __name__ == "__main__":
    main()
