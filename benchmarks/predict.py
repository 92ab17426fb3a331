"""What a graph says of a step's peak, beside what the compilers say.

    python -m benchmarks.predict                 # every step, for every target
    python -m benchmarks.predict alexnet h100    # those with such a name; others stay
    python -m benchmarks.predict --anew          # beside the compiled figures it has;
                                                 # names and targets choose here too

`jaxmem.scheduling.predict` compiles nothing: its figure is that of the order that XLA
is expected to take, without copies and workspaces. "off" is of the peak, arguments and
outputs included; "state" are those, which every order holds: what a prediction may get
wrong is the rest. "predicted ms" is of the compiled step. What does
not fit a TPU v5e is compiled for a v5p.
"""

import functools
import sys
from collections.abc import Callable, Iterator

from benchmarks._common import (
    MIB,
    MS,
    TARGETS,
    TOO_LARGE,
    compiled_with_ms,
    publish,
    published,
    write,
)
from benchmarks.blocks import made
from benchmarks.latency_hiding import scanned_step
from benchmarks.models import zoo
from benchmarks.release import dense_step
from benchmarks.steps.predict import dense_net, losses, lstm
from jaxmem.scheduling import predict

COLUMNS = ("step", "target", "state MiB", "predicted MiB", "compiled MiB", MS, "off %")


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
STEPS |= {
    "LSTM, 48 steps, 64 x 512, unrolled, Adam": lambda: lstm(48, 64, 512),
    "DenseNet-121, 1, Adam": lambda: dense_net((6, 12, 24, 16), 1, 224),
    "DenseNet-121, 32, Adam": lambda: dense_net((6, 12, 24, 16), 32, 224),
    **{
        f"six losses, {kind}, 8192 x {classes}": functools.partial(
            losses, kind, 8192, 256, classes
        )
        for kind in ("picked", "one-hot", "logsumexp")
        for classes in (1024, 5888)
    },
}
WRITTEN_OUT = ("vit_b", "bert_base", "gpt2_small")  # besides, at batch 1
PATIENCE = 1800  # seconds: a compile for TPU takes minutes
LARGER = {"tpu-v5e": "tpu-v5p"}  # chip -> another for what does not fit


def of_the_zoo() -> Iterator[tuple[str, Callable]]:
    """Its steps with Adam at both batches; of those with layers, scanned."""
    for name, entry in zoo.ZOO.items():
        variants = [(1, entry.layered), (32, entry.layered)]
        if name in WRITTEN_OUT:
            variants = [(1, False), *variants]
        for batch, scanned in variants:
            how = "scanned" if scanned else "unrolled"
            make = functools.partial(zoo.step, name, batch, scanned)
            yield f"{name}, {batch}, {how}, Adam", make


STEPS |= dict(of_the_zoo())


def row(name: str, target: str, peak: float | str, ms: float | str):
    step, args, donated = STEPS[name]()
    how = {"target": target, "donate_argnums": donated}
    found = predict(step, *args, **how)
    state = (found.argument_bytes + found.output_bytes) / MIB
    whole = found.peak_bytes / MIB
    off = "" if isinstance(peak, str) else 100 * (whole / peak - 1)
    return name, target, state, whole, peak, ms, off


def row_of_a_compile(name: str, target: str):
    step, args, donated = STEPS[name]()
    how = {"what": "peak_bytes", "donate_argnums": donated, "timeout": PATIENCE}
    found = compiled_with_ms(step, *args, target=target, **how)
    if found[0] == TOO_LARGE and target in LARGER:
        target = LARGER[target]
        found = compiled_with_ms(step, *args, target=target, **how)
    return row(name, target, *found)


def number(cell: str) -> float | str:
    return float(cell) if cell and not cell.startswith("does not") else cell


def main() -> None:
    words = [w for w in sys.argv[1:] if w not in (*TARGETS, "--anew")]
    targets = [t for t in TARGETS if t in sys.argv] or TARGETS
    chosen = [n for n in STEPS if not words or any(w in n for w in words)]
    anew = "--anew" in sys.argv
    sys.argv[1:] = []  # the file is that of all rows, whatever is asked for
    rows = {(r[0], r[1]): r for r in published("predict")}
    chips = {chip for t in targets for chip in (t, LARGER.get(t))}
    old = [key for key in rows if key[0] in chosen and key[1] in chips]
    new = [(name, target) for target in targets for name in chosen]
    for key in old if anew else new:
        known = map(number, rows[key][4:6]) if anew else ()
        found = row(*key, *known) if anew else row_of_a_compile(*key)
        rows[found[:2]] = found
        print(*found, flush=True)
        write("predict", COLUMNS, [*rows.values()])
    publish("predict", COLUMNS, [*rows.values()])


if __name__ == "__main__":
    main()
