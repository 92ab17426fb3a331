"""What the training step takes: residuals, compiled bytes, and the largest batch."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxmem
from jaxmem.demo.settings import Settings
from jaxmem.demo.training import Run, step_key

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
class Compiled:
    """Bytes of the training step as compiled for one target."""

    temp_bytes: int
    peak_bytes: int
    by_module: dict[str, int]


@dataclass(frozen=True)
class Largest:
    """A batch size, and whether a compile has shown that it fits."""

    batch: int
    confirmed: bool


class Probe(NamedTuple):
    """The training step and its loss, with shapes in place of values.

    `loss(trained, frozen, tokens, number)` takes the parts that `split` makes of the
    parameters.
    """

    step: Callable
    loss: Callable
    make_args: Callable[[int], tuple]
    split: Callable = partial(jaxmem.trainable, mask=True)

    def estimate(self, target: str, batch: int, **options) -> Any:
        """The `MemoryReport` of the step at this batch, with a donated state."""
        args = self.make_args(batch)
        return jaxmem.estimate(
            self.step, *args, target=target, donate_argnums=(0,), **options
        )


def probe(run: Run, settings: Settings) -> Probe:
    """A probe of a run whose state is not donated yet."""
    state = jax.eval_shape(lambda: run.state)
    number = jax.ShapeDtypeStruct((), jnp.int32)

    def make_args(batch):
        tokens = jax.ShapeDtypeStruct((batch, settings.context + 1), jnp.int32)
        return state, tokens, number

    def loss(trained, frozen, tokens, number):
        return run.loss(frozen.merge(trained), tokens, step_key(settings, number))

    split = partial(jaxmem.trainable, mask=settings.how.trains)
    return Probe(run.step, loss, make_args, split)


def measure(
    probes: Mapping[str, Probe],
    targets: Sequence[str],
    settings: Settings,
    report: Callable[[int, int, str], None],
    deadline: float,
) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """By name the fields of `comparison.Outcome`, and what failed with the reason.

    Compiles run side by side. Those at the given batch come first; the search for the
    largest batch ends at the deadline. What fails costs only its own figure.
    """
    pairs = [(name, target) for target in targets for name in probes]
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
        small = settings.batch, at_batch[name, target].peak_bytes
        return largest_batch(probes[name], target, small, deadline, settings.n)

    held = {
        name: residual_bytes(one, settings.batch // settings.n)
        for name, one in probes.items()
    }
    at_batch = each(lambda name, t: compiled(probes[name], t, settings.batch), pairs)
    largest = each(find_largest, [pair for pair in chips if pair in at_batch])
    figures = {"compiled": at_batch, "largest_batch": largest}
    return {
        name: {"residual_bytes": held[name]}
        | {
            figure: {t: by_pair[name, t] for t in targets if (name, t) in by_pair}
            for figure, by_pair in figures.items()
        }
        for name in probes
    }, tuple(sorted(problems))


def residual_bytes(one: Probe, batch: int) -> int:
    """What the forward pass of `batch` sequences saves, beside the parameters."""
    (params, _), tokens, number = one.make_args(batch)
    args = *one.split(params), tokens, number
    return jaxmem.residuals(one.loss, *args, argnums=0).total_bytes


def compiled(one: Probe, target: str, batch: int) -> Compiled:
    """The bytes of the step at this batch on one target."""
    report = one.estimate(target, batch)
    by_module = defaultdict(int)
    for holder in report.at_peak:
        if holder.kind == "temp":
            by_module[part(holder.module_path)] += holder.bytes
    return Compiled(report.temp_bytes, report.peak_bytes, dict(by_module))


def part(path: str) -> str:
    """The part of the GPT that a module path belongs to."""
    return next(name for name, pattern in _PARTS if re.search(pattern, path))


def largest_batch(
    one: Probe, target: str, small: tuple[int, int], deadline: float, n: int = 1
) -> Largest:
    """The largest batch that fits a chip, to two digits, and divisible by n.

    The demonstration has three minutes, and `jaxmem.max_batch`, which finds the exact
    number, takes more compiles. The peak is close to a straight line in the batch: one
    more compile gives the line, and another one confirms what it predicts.

    Args:
        one: the probe of a run.
        target: the chip.
        small: a batch size and the bytes its step takes there.
        deadline: of `time.monotonic()`; after it a prediction is left unconfirmed.
        n: micro-batches a step.
    """
    room = {t.name: t.memory_bytes for t in jaxmem.targets()}[target]
    assert room is not None  # a chip: no batch is the largest on cpu

    def peak(batch: int) -> int:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no time left to look for the largest batch")
        return one.estimate(target, batch, timeout=left).peak_bytes

    batch, bytes_ = small[0] * _FACTOR, peak(small[0] * _FACTOR)
    slope = (bytes_ - small[1]) / (batch - small[0])
    guess = rounded(int(batch + (room - bytes_) / slope)) // n * n
    try:
        return Largest(guess, peak(guess) <= room)
    except (TimeoutError, RuntimeError):  # no time left, or the compiler ran out
        return Largest(guess, False)


def rounded(batch: int) -> int:
    """Down to two digits: 2,671 is 2,600."""
    unit = 10 ** max(0, len(str(batch)) - 2)
    return batch // unit * unit
