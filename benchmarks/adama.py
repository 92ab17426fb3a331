"""AdamA beside AdamW on accumulated gradients: how a small GPT trains with either.

    python -m benchmarks.adama          # about ten minutes

The byte GPT of `jaxmem demo`, 2 layers of 64, 150 steps of 16 x 128 bytes, in eight
micro-batches, gradients clipped, three seeds, each with its own initial values and
data; the mean loss of the last 20 steps. AdamA clips the gradient of each micro-batch,
AdamW that of the batch.
"""

from statistics import fmean
from typing import Literal

from benchmarks._common import publish
from jaxmem.demo import _data, _train
from jaxmem.demo._compare import models
from jaxmem.demo._settings import Settings

SEEDS = (0, 1, 2)
LAST = 20  # steps
COLUMNS = ("optimizer", *(f"seed {s}" for s in SEEDS))
Scale = Literal["paper", "mean"] | None  # AdamA's `v_scale`; none of AdamW
WAYS: dict[str, Scale] = {
    "AdamW, accumulated": None,
    "AdamA": "paper",
    'AdamA, `v_scale="mean"`': "mean",
}


def last_losses(scale: Scale, seed: int) -> float:
    """The mean loss of the last steps."""
    settings = Settings(
        model="linen",
        seed=seed,
        steps=150,
        batch=16,
        layers=2,
        width=64,
        context=128,
        optimizer="adama" if scale else "adamw",
        micro_batches=8,
        v_scale=scale or "paper",
    )
    params, loss = models(settings)["plain"]
    run = _train.start(params, loss, settings, adama=scale is not None)
    text = _data.standard_library()
    crops = _data.batches(text.train, settings.batch, settings.context, seed)
    _train.train({"run": run}, crops, settings)
    return fmean(run.losses[-LAST:])


def main() -> None:
    rows = []
    for name, scale in WAYS.items():
        rows.append((name, *(f"{last_losses(scale, seed):.4f}" for seed in SEEDS)))
        print(*rows[-1], flush=True)
    publish("adama", COLUMNS, rows)


if __name__ == "__main__":
    main()
