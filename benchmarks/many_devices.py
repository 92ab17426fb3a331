"""Bytes of a device over how many there are: one step under FSDP, and scheduled.

    python -m benchmarks.many_devices       # all rows
    python -m benchmarks.many_devices 8     # rows of so many devices; others stay

16 Llama-like layers (width 2,048), 64 sequences of 2,048 tokens, AdamW, one sharding
constraint a layer; compiled for H100s, not run. Writes the figures to results/ and
draws them into docs/images/.
"""

import functools
import pathlib
import sys
from collections.abc import Sequence

import jaxmem
from benchmarks._common import MIB, MS, publish_some, size_and_ms
from benchmarks._pictures import GREY, IMAGES, OURS, TEXT, THEIRS, picture
from benchmarks.figures.rows import rows
from benchmarks.steps.devices import FSDP, llama_on

TARGET, BATCH = "h100", 64
COUNTS = (1, 2, 4, 8, 16, 32, 64)
TIMEOUT = 1200.0  # seconds of a compile
COLUMNS = (
    *("devices", "state and batch MiB", "plain MiB", f"plain: {MS}"),
    *("scheduled MiB", f"scheduled: {MS}", "sent MiB"),
)
PICTURE = IMAGES / "many_devices.svg"
GIB = 1024  # MiB
LINES = (("plain MiB", "the step as it was", THEIRS),)
LINES += (("scheduled MiB", "with jaxmem.schedule", OURS),)


def row(count: int) -> Sequence[float]:
    mesh = jaxmem.target_mesh(TARGET, (count,), ("data",))
    made = llama_on(mesh, FSDP, pinned=True, batch=BATCH)
    how = {"target": TARGET, "donate_argnums": made.donate, "timeout": TIMEOUT}
    plain = jaxmem.estimate(made.step, *made.args, **how)
    step = jaxmem.schedule(made.step, donate_argnums=made.donate)
    less = jaxmem.estimate(step, *made.args, **how)
    both = (*size_and_ms(plain, "peak_bytes"), *size_and_ms(less, "peak_bytes"))
    return plain.argument_bytes / MIB, *both, less.sent_bytes / MIB


def draw(found: Sequence[dict[str, str]], path: pathlib.Path) -> None:
    """GiB of a device over the number of devices, both in powers of two."""
    with picture(path, (7, 3.8), font=11) as figure:
        axes = figure.subplots()
        counts = [int(r["devices"]) for r in found]
        gib = lambda name: [float(r[name]) / GIB for r in found]
        for name, title, colour in LINES:
            axes.plot(counts, gib(name), "o-", color=colour, label=title)
        state = gib("state and batch MiB")
        axes.fill_between(counts, state, color=GREY, label="state and batch")
        axes.axhline(80, color=TEXT, linewidth=1, linestyle="--")
        axes.text(counts[-1], 84, "one H100", ha="right")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(counts, [str(n) for n in counts])
        ticks = [2**k for k in range(-1, 11)]
        axes.set_yticks(ticks, [f"{n:g}" for n in ticks])
        axes.set_ylim(0.5, 1.2 * max(gib("plain MiB")))
        axes.set(xlabel="devices", ylabel="GiB on each")
        axes.legend()


if __name__ == "__main__":
    cases = {(str(n),): functools.partial(row, n) for n in COUNTS}
    publish_some("many_devices", COLUMNS, cases, sys.argv[1:])
    draw(rows("many_devices"), PICTURE)
    print(f"wrote {PICTURE.relative_to(PICTURE.parent.parent.parent)}")
