"""Seconds: what steps take on a device, beside what is predicted of them.

All programs of a job are compiled side by side before the first is timed. The profiler
then tells what each kernel took, so that every kind of work is compared by itself: what
a chip reaches of its rates (`jaxmem.chips`) is fitted to that. The texts of the modules
and the kernels' times are left in build/device for whoever fits them.
"""

import contextlib
import dataclasses
import gzip
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import jaxmem
from benchmarks import blocks
from benchmarks._common import MIB, RESULTS
from benchmarks.device import machine, on_device, traces, true
from benchmarks.device.job import Job, Rows
from benchmarks.device.timing import in_turn
from benchmarks.readings.traces import by_instruction, plain_name
from jaxmem.chips import rates_of
from jaxmem.memory.buffers import parse_hlo
from jaxmem.memory.time.schedule import timed, total
from jaxmem.ops.attention import kernels
from pallas_kernels import dispatch
from pallas_kernels.measured import Measured

MODELS = ("BERT-Large, 8 x 512", *blocks.STACKS)
POLICIES = ("plain", "dots_with_no_batch_dims_saveable", "nothing_saveable")
LEFT = RESULTS.parent.parent / "build" / "device" / "traces"
ROUNDS = 8
# Kernels of what XLA puts into one kernel with the operations beside it.
FUSED_BY_XLA = ("layer_norm", "rms_norm", "dropout_add_layer_norm", "gelu", "silu")
AT_ONCE = 12  # compiles

Made = Callable[[bool], true.Made]


def jobs() -> Iterator[Job]:
    yield Job("seconds: steps", steps, seconds=280, value=2000)
    yield Job("seconds: substituted", substituted, seconds=60, value=1000)
    yield Job("seconds: substituted, our kernels", by_kernels, seconds=80, value=900)
    yield Job("seconds: substituted, XLA", by_xla, seconds=80, value=800)
    yield Job("seconds: substituted, all our kernels", by_all, seconds=80, value=850)


def programs() -> dict[str, Made]:
    """Of `small` to (step, arguments, how many are carried), by name."""
    found: dict[str, Made] = {}
    for name in MODELS:
        for policy in POLICIES:
            found[f"{name}, {policy}"] = partial(_gradient, name, policy)
        found[f"{name}, substitute"] = partial(_substituted, name)
    found["BERT-Large, 8 x 512, Adam"] = partial(true.trained, "plain")
    return found


def _gradient(name: str, policy: str, small: bool) -> true.Made:
    of, model = blocks.made(name, blocks.POLICIES[policy], small=small)
    return *of(model), 0


def _substituted(name: str, small: bool) -> true.Made:
    of, model = blocks.made(name, small=small)
    return *of(jaxmem.substitute(model)), 0


def steps(small: bool) -> Rows:
    yield from compared(programs(), small)


def substituted(small: bool) -> Rows:
    """With the attention that `implementation=None` takes on this device."""
    yield from compared(of_substitute("substitute"), small)


def of_substitute(what: str) -> dict[str, Made]:
    return {f"{name}, {what}": partial(_substituted, name) for name in MODELS}


def by_kernels(small: bool) -> Rows:
    """With our attention, as if it had been measured and there were no other's."""
    with _attention_of(_as_measured(["attention"])):
        yield from compared(of_substitute("substitute, our kernels"), small)


def by_all(small: bool) -> Rows:
    """With our norms and activations, which XLA cannot fuse with others."""
    taken = (*dispatch.MEASURED, *_as_measured(FUSED_BY_XLA))
    with mock.patch.object(dispatch, "MEASURED", taken):
        yield from compared(of_substitute("substitute, all our kernels"), small)


def _as_measured(kernels: Sequence[str]) -> list[Measured]:
    chip, passes = machine.chip(), (False, True)
    return [
        Measured(k, chip, "bfloat16", 0, which) for k in kernels for which in passes
    ]


def by_xla(small: bool) -> Rows:
    """With XLA's attention in blocks, to which our kernels are compared."""
    with _attention_of([]):
        yield from compared(of_substitute("substitute, XLA"), small)


@contextlib.contextmanager
def _attention_of(taken: Sequence[Measured]) -> Iterator[None]:
    """A context without the kernels of other makers, and with ours as `taken` says."""
    others = mock.patch.object(kernels, "_takers", lambda rules, inputs: [])
    with others, mock.patch.object(dispatch, "MEASURED", tuple(taken)):
        yield


def compared(programs: dict[str, Made], small: bool) -> Rows:
    """A row for each program, and what its kernels took by what they wait for."""
    made = {name: make(small) for name, make in programs.items()}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        compiled = dict(zip(made, pool.map(_compiled, made.values()), strict=True))
    for name, (_, args, carried) in made.items():
        filled = on_device.possible(on_device.filled(args, on_device.WORDS))
        step = on_device.Step(compiled.pop(name), filled, carried)
        fit, refused = on_device.that_fit({name: step})
        if refused:
            yield {"step": name, "fits": False, "said": refused[name]}
        else:
            yield from _rows(name, fit[name], small)


def _compiled(made: true.Made) -> Any:
    return on_device.compiled(made[0], made[1])


def _rows(name: str, step: on_device.Step, small: bool) -> Rows:
    text = step.compiled.as_text()
    times = in_turn({name: step}, 2 if small else ROUNDS)[name]
    row = {"step": name, **times, "compiled MiB": _mib(step)}
    found = traces.kernels(step, 1 if small else 3)
    row["kernels ms"] = 1e3 * sum(kernel.seconds for kernel in found)
    row["kernels"] = sum(kernel.times for kernel in found)
    left(name, text, found)
    rates = rates_of(machine.target())
    if rates is None:
        yield row | {"predicted": f"no rates for {machine.target()}"}
        return
    predicted = timed(parse_hlo(text), rates).kernels
    said = total(predicted)
    yield row | {"predicted ms": 1e3 * said, "ratio": 1e3 * said / times["ms"]}
    yield from ({"step": name, **row} for row in by_bound(predicted, found))


def by_bound(predicted: list, found: list[traces.Kernel]) -> Rows:
    """What kernels of each kind took, those that the profiler names."""
    seen = by_instruction(found)
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    ratios: dict[str, list[float]] = defaultdict(list)
    for one in predicted:
        said, of = one.times * one.seconds, sums[one.bound]
        if plain_name(one.name) in seen:
            _, took = seen[plain_name(one.name)]
            for n, more in enumerate((one.times, said, took)):
                of[n] += more
            if took:
                ratios[one.bound].append(said / took)
        else:
            of[3] += said
    for bound, (times, said, took, unseen) in sums.items():
        some = {"kernels": times, "predicted ms": 1e3 * said, "ms": 1e3 * took}
        some["not seen, predicted ms"] = 1e3 * unseen
        if ratios[bound]:
            some["median ratio"] = statistics.median(ratios[bound])
        yield {"bound": bound, **some}


def left(name: str, text: str, found: list[traces.Kernel]) -> None:
    """The module and its kernels' times, for a closer look."""
    LEFT.mkdir(parents=True, exist_ok=True)
    path = LEFT / f"{re.sub(r'[^A-Za-z0-9]+', '-', name)}.json.gz"
    rows = [dataclasses.asdict(kernel) for kernel in found]
    with gzip.open(path, "wt") as file:
        json.dump({"name": name, "kernels": rows, "module": text}, file)


def _mib(step: on_device.Step) -> float:
    return on_device.compiled_bytes(step.compiled) / MIB
