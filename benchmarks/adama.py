"""AdamA beside AdamW on accumulated gradients: how small GPTs train with either.

    python -m benchmarks.adama          # the small model; about ten minutes
    python -m benchmarks.adama large    # another row each; those of the other stay

The byte GPT of `jaxmem demo`, eight micro-batches, gradients clipped, three seeds, each
with its own initial values and data; the mean loss of the last 20 steps. AdamA clips
the gradient of each micro-batch, AdamW that of the batch.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from benchmarks._common import publish, published, write
from jaxmem.demo import _data, _train
from jaxmem.demo._compare import models
from jaxmem.demo._settings import Settings

SEEDS = (0, 1, 2)
LAST = 20  # steps
COLUMNS = ("model", "steps", "optimizer", *(f"seed {s}" for s in SEEDS))


@dataclass(frozen=True)
class Case:
    """A model, how long it trains, and with which optimizer; `v_scale` is AdamA's."""

    layers: int
    width: int
    batch: int
    context: int
    steps: int
    v_scale: Literal["paper", "mean"] | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """The first cells of its row."""
        size = f"{self.layers} layers of {self.width}"
        optimizers = {"paper": "AdamA", "mean": 'AdamA, `v_scale="mean"`'}
        optimizer = optimizers.get(self.v_scale, "AdamW, accumulated")
        tokens = f"{self.batch} x {self.context} bytes"
        return f"{size}, {tokens}", str(self.steps), optimizer

    def settings(self, seed: int) -> Settings:
        return Settings(
            model="linen",
            seed=seed,
            steps=self.steps,
            batch=self.batch,
            layers=self.layers,
            width=self.width,
            context=self.context,
            optimizer="adama" if self.v_scale else "adamw",
            micro_batches=8,
            v_scale=self.v_scale or "paper",
        )


SMALL = [Case(2, 64, 16, 128, 150, scale) for scale in (None, "paper", "mean")]
LARGE = [Case(4, 128, 8, 256, 100, scale) for scale in (None, "paper")]


def last_losses(case: Case, seed: int) -> float:
    """The mean loss of the last steps."""
    settings = case.settings(seed)
    params, loss = models(settings)["plain"]
    run = _train.start(params, loss, settings, adama=case.v_scale is not None)
    text = _data.standard_library()
    crops = _data.batches(text.train, settings.batch, settings.context, seed)
    _train.train({"run": run}, crops, settings)
    return sum(run.losses[-LAST:]) / LAST


def measured(cases: list[Case]) -> Iterator[tuple]:
    for case in cases:
        yield *case.key, *(f"{last_losses(case, seed):.4f}" for seed in SEEDS)


def main() -> None:
    if unknown := set(sys.argv[1:]) - {"large"}:
        sys.exit(f"unknown: {', '.join(unknown)}; known: large")
    cases = LARGE if sys.argv[1:] else SMALL
    sys.argv[1:] = []  # the file is that of all rows
    order = [case.key for case in (*SMALL, *LARGE)]
    rows = {tuple(r[:3]): r for r in published("adama")}
    for found in measured(cases):
        rows[found[:3]] = found
        print(*found, flush=True)
        write(
            "adama",
            COLUMNS,
            sorted(rows.values(), key=lambda r: order.index(tuple(r[:3]))),
        )
    publish("adama", COLUMNS, published("adama"))


if __name__ == "__main__":
    main()
