"""Trains the plain and the substituted model and collects how they differ."""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import flax
import jax
import numpy as np

import jaxmem
from jaxmem.demo import data, measuring, training
from jaxmem.demo.settings import Settings

_VALIDATION_BATCHES = 8


@dataclass(frozen=True)
class Outcome:
    """The results of one of the two runs.

    Attributes:
        losses: training loss of each step, nats a byte.
        validation: loss on files not trained on, nats a byte.
        seconds: median of a step.
        residual_bytes: what the forward pass saves for the backward pass.
        compiled: by target, the bytes of the compiled step.
        largest_batch: by target, to two digits, the most sequences a step that fit.
    """

    losses: tuple[float, ...]
    validation: float
    seconds: float
    residual_bytes: int
    compiled: dict[str, measuring.CompiledBytes]
    largest_batch: dict[str, measuring.Largest]


@dataclass(frozen=True)
class Comparison:
    """Plain against substituted, on the same seed and batches."""

    settings: Settings
    plain: Outcome
    substituted: Outcome
    time_ratio: float
    problems: tuple[str, ...]
    versions: dict[str, str]

    @property
    def loss_gap(self) -> float:
        """Largest difference between the two training losses at any step."""
        gaps = np.subtract(self.plain.losses, self.substituted.losses)
        return float(np.max(np.abs(gaps)))

    def to_json(self) -> dict[str, Any]:
        """Everything as plain dicts, lists and numbers."""
        settings = asdict(self.settings) | {"micro_batches": self.settings.n}
        return asdict(self) | {"settings": settings, "loss_gap": self.loss_gap}


def compare(
    settings: Settings,
    targets: Sequence[str] = ("cpu",),
    seconds: float = 160.0,
    *,
    on_step: Callable[[int, dict[str, float]], None] = lambda step, losses: None,
    on_compile: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Comparison:
    """Runs the demonstration.

    Args:
        settings: model and course of the training.
        targets: chips to compile the training step for, as in `jaxmem.targets()`.
        seconds: when to give up the search for the largest batch.
        on_step: is called with the number of the step and the loss of each run.
        on_compile: is called with the number of compiles done, their total, and a name.

    Returns:
        Losses, times and bytes of both runs.

    Raises:
        ValueError: for an unknown target.
        FileNotFoundError: if Python came without its sources.
    """
    deadline = time.monotonic() + seconds
    text = data.standard_library()
    runs = {
        name: training.start(
            *pair, settings, "adamw" if name == "plain" else settings.optimizer
        )
        for name, pair in training.pair(settings).items()
    }
    crops = data.batches(text.train, settings.batch, settings.context, settings.seed)

    def report(step, runs):
        on_step(step, {name: run.losses[-1] for name, run in runs.items()})

    training.train(runs, crops, settings, report)
    for run in runs.values():
        crops = data.batches(text.validation, settings.batch, settings.context, 0)
        run.validation = training.validate(run, crops, _VALIDATION_BATCHES)
    measured = measuring.measure(runs, settings, targets, deadline, on_compile)
    figures, problems = measured
    outcomes = {
        name: Outcome(
            tuple(run.losses), run.validation, median(run.seconds), **figures[name]
        )
        for name, run in runs.items()
    }
    # Neighbours in time are compared, and not averages.
    steps = zip(runs["plain"].seconds, runs["substituted"].seconds, strict=True)
    time_ratio = median(lean / plain for plain, lean in steps)
    versions = {
        "jaxmem": jaxmem.__version__,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "python": platform.python_version(),
        "backend": jax.default_backend(),
    }
    return Comparison(
        settings,
        **outcomes,
        time_ratio=time_ratio,
        problems=problems,
        versions=versions,
    )
