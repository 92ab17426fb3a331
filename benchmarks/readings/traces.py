"""Profiles of steps that are kept in results/: a module's text and its kernels' times.

`keep` makes them of what `benchmarks.device` leaves in build/device/traces. Source
lines are left out, and with them the paths of a machine; and what Pallas kernels do.

Those of steps with "our kernels" were compiled before these kernels declared their
cost. Their calls have been given the attributes that they have now.
"""

import gzip
import json
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks._common import RESULTS

H200 = RESULTS / "traces-h200-jax0.11.2"
TABLES = re.compile(  # of source lines
    r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*\n?",
    re.MULTILINE,
)
_FRAME = re.compile(r" stack_frame_id=\d+")
_KERNEL = re.compile(r'\bmodule = "(?:[^"\\]|\\.)*"')  # of Mosaic, in its own format


class Kernel(NamedTuple):
    """All runs of a kernel in a step.

    Attributes:
      op: the instruction of the module, or the CUDA graph that it is in.
      name: the kernel's own.
      times: it runs in a step.
      seconds: of these together.
    """

    op: str
    name: str
    times: float
    seconds: float


class Trace(NamedTuple):
    """A step on a device.

    Attributes:
      name: of the step.
      ms: that it takes, by the host's clock.
      kernels: that the profiler has seen.
      module: its text.
    """

    name: str
    ms: float
    kernels: list[Kernel]
    module: str


def traces(folder: pathlib.Path = H200) -> Iterator[Trace]:
    """The steps of a folder."""
    for path in sorted(folder.glob("*.json.gz")):
        with gzip.open(path, "rt") as file:
            name, ms, kernels, module = json.load(file)
        yield Trace(name, ms, [Kernel(*kernel) for kernel in kernels], module)


def keep(left: pathlib.Path, ms: Mapping[str, float], folder: pathlib.Path) -> None:
    """Writes those steps of `left` whose milliseconds are given."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(left.glob("*.json.gz")):
        with gzip.open(path, "rt") as file:
            said = json.load(file)
        name = said["name"]
        if name not in ms:
            continue
        kernels = [
            Kernel(k["op"], k["name"], k["times"], round(k["seconds"], 10))
            for k in said["kernels"]
        ]
        module = _FRAME.sub("", TABLES.sub("", said["module"]))
        module = _KERNEL.sub('module = ""', module)
        trace = Trace(name, ms[name], kernels, module)
        pack(folder / path.name, trace)


def pack(path: pathlib.Path, value: Any) -> None:
    """Writes JSON, gzipped to the same bytes whenever it is written."""
    with path.open("wb") as file:
        with gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
            packed.write(json.dumps(value).encode())


def plain_name(name: str) -> str:
    """The name of an instruction as XLA calls its kernel: as C allows it."""
    return re.sub(r"\W", "_", name)


def by_instruction(kernels: Iterable[Kernel]) -> dict[str, list[float]]:
    """Name of an instruction, or else of a kernel -> times, and seconds of all runs.

    A call of a library may run several kernels, outside of a graph under its own name.
    """
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for kernel in kernels:
        named = kernel.op and not kernel.op.startswith("command_buffer")
        of = found[plain_name(kernel.op if named else kernel.name)]
        of[0] = max(of[0], kernel.times)
        of[1] += kernel.seconds
    return found
