"""What the training step takes: residuals and the bytes of its compiles."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxmem
from jaxmem.demo._largest import Largest, largest_batch
from jaxmem.demo._optimizers import step_key
from jaxmem.demo._settings import Settings
from jaxmem.demo._train import Run

SIDE_BY_SIDE = 2
_PARTS = (
    ("attention", r"attention"),
    ("mlp", r"mlp|up|down|jaxmem\.gelu"),
    ("head and loss", r"head|norm|loss"),
    ("embed", r"embed|position"),
)
# In linen the call of gelu and the residual additions have no module of their own.
_BLOCK = re.compile(r"blocks?(/|$)")


@dataclass(frozen=True)
class Compiled:
    """Bytes of the training step as compiled for one target."""

    temp_bytes: int
    peak_bytes: int
    by_module: dict[str, int]


class Probe(NamedTuple):
    """The training step and its loss, with shapes in place of values.

    `loss(trained, frozen, tokens, number)` is of the parts that `split` makes of the
    parameters.
    """

    step: Callable
    loss: Callable
    make_args: Callable[[int], tuple]
    split: Callable = partial(jaxmem.trainable, mask=True)


@dataclass
class Found:
    """What was measured of one run."""

    residual_bytes: int
    compiled: dict[str, Compiled] = field(default_factory=dict)
    largest_batch: dict[str, Largest] = field(default_factory=dict)


def probe(run: Run, settings: Settings) -> Probe:
    """What can be asked of a run before its state is donated away."""
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
) -> tuple[dict[str, Found], tuple[str, ...]]:
    """Bytes of each probe, and what could not be measured and why.

    Compiles run side by side, all of this batch before any that looks for the largest
    one, which ends at the deadline. What fails costs its own figure alone.
    """
    found = {
        name: Found(residual_bytes(one, settings.batch // settings.n))
        for name, one in probes.items()
    }

    def compile_one(name, target):
        found[name].compiled[target] = compiled(probes[name], target, settings.batch)

    def find_largest(name, target):
        one = probes[name]
        small = settings.batch, found[name].compiled[target].peak_bytes
        found[name].largest_batch[target] = largest_batch(
            one, target, small, deadline, settings.n
        )

    pairs = [(name, target) for target in targets for name in probes]
    chips = [pair for pair in pairs if pair[1] != "cpu"]
    total, problems = len(pairs) + len(chips), []
    for act, jobs in ((compile_one, pairs), (find_largest, chips)):
        jobs = [j for j in jobs if act is compile_one or j[1] in found[j[0]].compiled]
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            futures = {pool.submit(act, *job): job for job in jobs}
            start = 0 if act is compile_one else len(pairs)
            for done, future in enumerate(as_completed(futures), start + 1):
                what = "{} for {}".format(*futures[future])
                report(done, total, what)
                if error := future.exception():
                    problems.append(f"{what}: {error}")
    for one in found.values():  # in the order asked for, not as they were ready
        one.compiled = _ordered(one.compiled, targets)
        one.largest_batch = _ordered(one.largest_batch, targets)
    return found, tuple(sorted(problems))


def _ordered(by_target: dict, targets: Sequence[str]) -> dict:
    return {target: by_target[target] for target in targets if target in by_target}


def residual_bytes(one: Probe, batch: int) -> int:
    """What the backward pass keeps of the forward pass, beside the parameters.

    Of as many sequences as are in work at once.
    """
    (params, _), tokens, number = one.make_args(batch)
    args = *one.split(params), tokens, number
    return jaxmem.residuals(one.loss, *args, argnums=0).total_bytes


def compiled(one: Probe, target: str, batch: int) -> Compiled:
    """The bytes of the step at this batch on one target."""
    report = jaxmem.estimate(
        one.step, *one.make_args(batch), target=target, donate_argnums=(0,)
    )
    return Compiled(report.temp_bytes, report.peak_bytes, by_module(report))


def by_module(report) -> dict[str, int]:
    """Temporary bytes at the peak under the parts of the model."""
    held = defaultdict(int)
    for holder in report.at_peak:
        if holder.kind == "temp":
            held[part(holder.module_path)] += holder.bytes
    return dict(held)


def part(path: str) -> str:
    """The part of the GPT that a module path belongs to."""
    for name, pattern in _PARTS:
        if re.search(rf"(^|[/_])({pattern})", path):
            return name
    return "gelu and sums" if _BLOCK.search(path) else "update and the rest"
