"""Trains the plain and the substituted model and gathers what tells them apart."""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxmem
from jaxmem.demo import _data, _gpt_linen, _gpt_nnx, _losses, _measure, _train
from jaxmem.demo._largest import Largest
from jaxmem.demo._settings import Settings

NAMES = ("plain", "substituted")
_MODELS = {"nnx": _gpt_nnx, "linen": _gpt_linen}
_VALIDATION_BATCHES = 8


@dataclass(frozen=True)
class Outcome:
    """What one of the two runs came to.

    Attributes:
        losses: training loss of each step, nats a byte.
        validation: loss on files not trained on, nats a byte.
        seconds: median of a step.
        residual_bytes: what the backward pass keeps of the forward pass.
        compiled: by target, the bytes of the compiled step.
        largest_batch: by target, to two digits, the sequences a step that still fit.
    """

    losses: tuple[float, ...]
    validation: float
    seconds: float
    residual_bytes: int
    compiled: dict[str, _measure.Compiled]
    largest_batch: dict[str, Largest]


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
        return float(
            np.max(np.abs(np.subtract(self.plain.losses, self.substituted.losses)))
        )

    def to_json(self) -> dict[str, Any]:
        """Everything as plain dicts, lists and numbers."""
        settings = asdict(self.settings) | {"micro_batches": self.settings.n}
        return asdict(self) | {"settings": settings, "loss_gap": self.loss_gap}


class Listener(NamedTuple):
    """Who is told how far the comparison has come."""

    training: Callable[[int, dict[str, float]], None] = lambda step, losses: None
    measuring: Callable[[int, int, str], None] = lambda done, total, what: None


_SILENT = Listener()


def models(settings: Settings) -> dict[str, tuple[Any, Callable]]:
    """(initial parameters, loss) of the plain model and of the substituted one."""
    flavour, how = _MODELS[settings.model], settings.how
    plain = how.first(flavour.build(settings))

    def made(model, loss):
        params, forward = flavour.split(model, settings)
        return params, loss(forward)

    return {
        "plain": made(plain, _losses.from_logits),
        "substituted": made(how.change(plain), how.loss),
    }


def compare(
    settings: Settings,
    targets: Sequence[str] = ("cpu",),
    listener: Listener = _SILENT,
    seconds: float = 160.0,
) -> Comparison:
    """Runs the demonstration.

    Args:
        settings: model and course of the training.
        targets: chips to compile the training step for, as in `jaxmem.targets()`.
        listener: is told of each step and each compile.
        seconds: when to give up the search for the largest batch.

    Returns:
        Losses, times and bytes of both runs.

    Raises:
        ValueError: for an unknown target.
        FileNotFoundError: where Python came without its sources.
    """
    began = time.monotonic()
    text = _data.standard_library()
    pairs = models(settings)
    adama = {"substituted": settings.optimizer == "adama"}
    runs = {
        name: _train.start(*pair, settings, adama.get(name, False))
        for name, pair in pairs.items()
    }
    probes = {name: _measure.probe(run, settings) for name, run in runs.items()}
    crops = _data.batches(text.train, settings.batch, settings.context, settings.seed)

    def report(step, runs):
        listener.training(step, {name: run.losses[-1] for name, run in runs.items()})

    _train.train(runs, crops, settings, report)
    for run in runs.values():
        crops = _data.batches(text.validation, settings.batch, settings.context, 0)
        run.validation = _train.validate(run, crops, _VALIDATION_BATCHES)
    found, problems = _measure.measure(
        probes, targets, settings, listener.measuring, began + seconds
    )
    outcomes = {n: _outcome(runs[n], found[n]) for n in NAMES}
    return Comparison(
        settings,
        **outcomes,
        time_ratio=_time_ratio(*(runs[n].seconds for n in NAMES)),
        problems=problems,
        versions=_versions(),
    )


def _outcome(run: _train.Run, found: _measure.Found) -> Outcome:
    return Outcome(
        losses=tuple(run.losses),
        validation=run.validation,
        seconds=median(run.seconds),
        residual_bytes=found.residual_bytes,
        compiled=found.compiled,
        largest_batch=found.largest_batch,
    )


def _time_ratio(plain: Sequence[float], substituted: Sequence[float]) -> float:
    """Median over the steps: neighbours in time are compared, not averages."""
    return median(s / p for p, s in zip(plain, substituted, strict=True))


def _versions() -> dict[str, str]:
    import flax

    return {
        "jaxmem": jaxmem.__version__,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "python": platform.python_version(),
        "backend": jax.default_backend(),
    }
