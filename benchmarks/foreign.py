"""Models that others wrote: what a step of each takes, as it is and with jaxmem.

    python -m benchmarks.foreign [library/family ...]

An Adam step, state donated, compiled for an H100: its temporaries as the library has
it, substituted, scheduled, and both. Four layers of width 512, 8 sequences of 128 tokens
or 8 images of 224 x 224; dropout as each model has it by default. It needs the extra
`foreign`. Families that are named are measured anew, the other rows kept.
"""

import sys
from collections.abc import Callable

import jax

import jaxmem
from benchmarks import foreign_models as models
from benchmarks._common import (
    Row,
    as_a_whole,
    compiled,
    publish,
    published,
)
from benchmarks.foreign_models import KEY, REAL, Loss, Model

TARGET = "h100"
COLUMNS = ("library", "family", "plain", "substituted", "scheduled", "both")
MIB_COLUMNS = tuple(f"{c} (MiB)" if c not in COLUMNS[:2] else c for c in COLUMNS)


def temporaries(model: Model, loss: Loss, wrap: Callable) -> float | str:
    """MiB of a step with this loss."""
    state = jax.eval_shape(lambda: models.state(model))
    step = wrap(models.train_step(loss), donate_argnums=(0,))
    return compiled(step, state, model.batch, KEY, what="temp_bytes", target=TARGET)


def row(library: str, family: str) -> list:
    """Temporaries of the four steps of one family."""
    model = models.build(library, family, REAL)
    losses = (model.loss, model.lean)
    wraps = (jax.jit, jaxmem.schedule)
    return [temporaries(model, loss, wrap) for wrap in wraps for loss in losses]


def main() -> None:
    named = sys.argv[1:]
    known = {f"{library}/{family}" for library, family in models.families()}
    if wrong := set(named) - known:
        raise SystemExit(f"{', '.join(wrong)}: one of {', '.join(sorted(known))}")
    before: dict[str, Row] = {}
    if named:
        before = {f"{r[0]}/{r[1]}": r for r in published("foreign")}
    as_a_whole()
    rows = []
    for library, family in models.families():
        name = f"{library}/{family}"
        if named and name not in named:
            rows += [before[name]] if name in before else []
            continue
        rows.append([library, family, *row(library, family)])
        print(*rows[-1], flush=True)
    publish("foreign", MIB_COLUMNS, rows)


if __name__ == "__main__":
    main()
