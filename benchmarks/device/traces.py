"""What the profiler of JAX saw: the kernels of some calls and the seconds of each."""

import pathlib
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.profiler import ProfileData

DEVICE = "/device:"


@dataclass(frozen=True)
class Kernel:
    """All runs of a kernel in a call.

    Attributes:
      module: the program that it belongs to.
      op: the instruction of the compiled module; "" where the profiler has none.
      name: the kernel's own.
      times: it has run in a call.
      seconds: of these together.
    """

    module: str
    op: str
    name: str
    times: float
    seconds: float


def kernels(call: Callable[[], Any], calls: int = 3) -> list[Kernel]:
    """The kernels of a call, which has run before; means over some calls."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(call())
        path = next(pathlib.Path(folder).glob("**/*.xplane.pb"))
        return _kernels(ProfileData.from_file(str(path)), calls)


def _kernels(data: ProfileData, calls: int) -> list[Kernel]:
    planes = list(data.planes)
    devices = [p for p in planes if p.name.startswith(DEVICE)]
    sums: dict[tuple, list[float]] = defaultdict(lambda: [0, 0.0])
    for plane in devices or planes:
        for line in plane.lines:
            for event in line.events:
                said = dict(event.stats)
                op, module = str(said.get("hlo_op", "")), said.get("hlo_module", "")
                if not (op or devices):
                    continue  # the host's own
                found = sums[str(module), op, event.name]
                found[0] += 1
                found[1] += event.duration_ns * 1e-9
    return [
        Kernel(*key, times=n / calls, seconds=took / calls)
        for key, (n, took) in sums.items()
    ]
