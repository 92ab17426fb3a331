"""What the training step takes: residuals, compiled bytes, and the largest batch."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem
from jaxmem.demo.settings import Settings
from jaxmem.demo.training import TrainingRun, step_key

SIDE_BY_SIDE = 2  # compiles
_FACTOR = 64  # between the two batches that a line is drawn through
# Parts of the GPT by module paths. In linen the call of gelu and the residual additions
# have no module of their own.
_PARTS = (
    ("attention", r"(^|[/_])attention"),
    ("mlp", r"(^|[/_])(mlp|up|down|jaxmem\.gelu)"),
    ("head and loss", r"(^|[/_])(head|norm|loss)"),
    ("embed", r"(^|[/_])(embed|position)"),
    ("gelu and sums", r"blocks?(/|$)"),
    ("update and the rest", ""),
)


@dataclass(frozen=True)
class CompiledBytes:
    """Bytes of the training step as compiled for one target."""

    temp_bytes: int
    peak_bytes: int
    by_module: dict[str, int]


@dataclass(frozen=True)
class Largest:
    """A batch size, and whether a compile has shown that it fits."""

    batch: int
    confirmed: bool


def _shapes(run: TrainingRun, settings: Settings, batch: int) -> tuple[Any, Any, Any]:
    """The arguments of a step at this batch, as shapes."""
    tokens = jax.ShapeDtypeStruct((batch, settings.context + 1), jnp.int32)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.eval_shape(lambda: run.state), tokens, number


def _estimate(
    run: TrainingRun, settings: Settings, target: str, batch: int, **options
) -> Any:
    """The report on a step with a donated state, as `jaxmem.estimate` makes it."""
    args, donated = _shapes(run, settings, batch), {"donate_argnums": (0,)}
    return jaxmem.estimate(run.step, *args, target=target, **donated, **options)


def measure(
    runs: Mapping[str, TrainingRun],
    settings: Settings,
    targets: Sequence[str],
    deadline: float,
    report: Callable[[int, int, str], None],
) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """By name the fields of `comparison.Outcome`, and what failed with the reason."""
    # Compiles run side by side. Those at the given batch come first; the search for the
    # largest batch ends at the deadline. What fails costs only its own figure.
    pairs = [(name, target) for target in targets for name in runs]
    chips = [pair for pair in pairs if pair[1] != "cpu"]
    total, done, problems = len(pairs) + len(chips), count(1), []

    def each(act: Callable, jobs) -> dict:
        results = {}
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            futures = {pool.submit(act, *job): job for job in jobs}
            for future in as_completed(futures):
                what = "{} for {}".format(*futures[future])
                report(next(done), total, what)
                if error := future.exception():
                    problems.append(f"{what}: {error}")
                else:
                    results[futures[future]] = future.result()
        return results

    def find_largest(name, target):
        peak = at_batch[name, target].peak_bytes
        return largest_batch(runs[name], settings, target, peak, deadline)

    at_batch = each(lambda name, t: compiled(runs[name], settings, t), pairs)
    largest = each(find_largest, [pair for pair in chips if pair in at_batch])
    figures = {}
    for name, run in runs.items():
        figures[name] = {"residual_bytes": residual_bytes(run, settings)}
        for figure, found in (("compiled", at_batch), ("largest_batch", largest)):
            of_run = {t: found[name, t] for t in targets if (name, t) in found}
            figures[name][figure] = of_run
    return figures, tuple(sorted(problems))


def residual_bytes(run: TrainingRun, settings: Settings) -> int:
    """What the forward pass of a micro-batch saves, beside the parameters."""
    batch = settings.batch // settings.n
    (params, _), tokens, number = _shapes(run, settings, batch)

    def loss(trained, frozen, tokens, number):
        return run.loss(frozen.merge(trained), tokens, step_key(settings, number))

    parts = jaxmem.trainable(params, settings.how.trains)
    return jaxmem.residuals(loss, *parts, tokens, number, argnums=0).total_bytes


def compiled(run: TrainingRun, settings: Settings, target: str) -> CompiledBytes:
    """The bytes of the step on one target."""
    report = _estimate(run, settings, target, settings.batch)
    by_module = defaultdict(int)
    for holder in report.at_peak:
        if holder.kind == "temp":
            by_module[part(holder.module_path)] += holder.bytes
    return CompiledBytes(report.temp_bytes, report.peak_bytes, dict(by_module))


def part(path: str) -> str:
    """The part of the GPT that a module path belongs to."""
    return next(name for name, pattern in _PARTS if re.search(pattern, path))


def largest_batch(
    run: TrainingRun, settings: Settings, target: str, peak_bytes: int, deadline: float
) -> Largest:
    """The largest batch that fits a chip, to two digits, of whole micro-batches."""
    # The demonstration has three minutes, and `jaxmem.max_batch`, which finds the exact
    # number, takes more compiles. The peak is close to a straight line in the batch:
    # one more compile gives the line, and another one confirms what it predicts. After
    # the deadline, of `time.monotonic()`, a prediction is left unconfirmed.
    # `peak_bytes` is the peak at the settings' batch.
    room = {t.name: t.memory_bytes for t in jaxmem.targets()}[target]
    assert room is not None  # a chip: no batch is the largest on cpu

    def peak(batch: int) -> int:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no time left to look for the largest batch")
        return _estimate(run, settings, target, batch, timeout=left).peak_bytes

    batch = settings.batch * _FACTOR
    bytes_ = peak(batch)
    slope = (bytes_ - peak_bytes) / (batch - settings.batch)
    fits = rounded(int(batch + (room - bytes_) / slope))
    fits = fits // settings.n * settings.n
    try:
        return Largest(fits, peak(fits) <= room)
    except (TimeoutError, RuntimeError):  # no time left, or the compiler ran out
        return Largest(fits, False)


def rounded(batch: int) -> int:
    """Down to two digits: 2,671 is 2,600."""
    unit = 10 ** max(0, len(str(batch)) - 2)
    return batch // unit * unit
