"""Models that others wrote: what a step of each takes, as it is and with jaxmem.

    python -m benchmarks.foreign [library/family ...]

An Adam step, state donated, compiled for an H100: its temporaries as the library has
it, substituted, scheduled for that chip, and both. Two layers of width 512, 8 sequences
of 128 tokens or 8 images of 224 x 224; dropout as each model has it by default. It
needs the extra `foreign`. Families that are named are measured anew, and the other rows
kept.
"""

import functools
import sys

import jax

import jaxmem
from benchmarks._common import (
    MS,
    as_a_whole,
    compiled_with_ms,
    publish,
    published,
    write,
)
from benchmarks.models import foreign as models
from benchmarks.models.foreign import KEY, REAL, Loss, Model

TARGET = "h100"
VARIANTS = ("plain", "substituted", "scheduled", "both")
COLUMNS = (
    *("library", "family"),
    *(f"{how}{column}" for how in VARIANTS for column in (" (MiB)", f": {MS}")),
)


def temporaries(model: Model, loss: Loss, scheduled: bool):
    """MiB and predicted milliseconds of a step with this loss."""
    state = jax.eval_shape(lambda: models.state(model))
    wrap = functools.partial(jaxmem.schedule, target=TARGET) if scheduled else jax.jit
    step = wrap(models.train_step(loss), donate_argnums=(0,))
    args = state, model.batch, KEY
    return compiled_with_ms(step, *args, what="temp_bytes", target=TARGET)


def measure(library: str, family: str) -> list[float | str]:
    """Temporaries and milliseconds of the four steps of one family."""
    model = models.build(library, family, REAL)
    losses = (model.loss, model.lean)
    return [
        cell
        for variant in (False, True)
        for loss in losses
        for cell in temporaries(model, loss, variant)
    ]


def main() -> None:
    named = sys.argv[1:]
    known = {f"{library}/{family}" for library, family in models.families()}
    if wrong := set(named) - known:
        raise SystemExit(f"{', '.join(wrong)}: one of {', '.join(sorted(known))}")
    rows = {tuple(row[:2]): row for row in published("foreign")} if named else {}
    as_a_whole()
    for library, family in models.families():
        if named and f"{library}/{family}" not in named:
            continue
        found = measure(library, family)
        print(library, family, *found, flush=True)
        rows[library, family] = [library, family, *found]
        write("foreign", COLUMNS, in_order(rows))  # what is measured is kept
    publish("foreign", COLUMNS, in_order(rows))


def in_order(rows: dict) -> list:
    """The rows there are, in the order of the families."""
    return [rows[name] for name in models.families() if name in rows]


if __name__ == "__main__":
    main()
