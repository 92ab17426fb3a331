"""What XLA's own cost models say of steps, in their modules, kept in results/.

libtpu writes `estimated_cycles` into the configuration of most operations, one run
each: a loop's have to be multiplied by its trips. Not estimated are asynchronous copies
and operations on a few numbers. XLA:GPU writes, if asked, what a fusion or a product
takes without its launch.

Source lines and names are left out of what is kept, and with them the paths of a
machine; of a TPU's operations the rest of their configurations, too.
"""

import gzip
import json
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks._common import RESULTS
from benchmarks.readings.traces import TABLES, pack
from jaxmem.chips import Rates
from jaxmem.memory.buffers.hlo import Hlo
from jaxmem.memory.time.schedule import TimedKernel

CYCLES = RESULTS / "cycles-jax0.10.2"
COSTS = RESULTS / "costs-jax0.10.2"
_ESTIMATED = re.compile(r'"estimated_cycles":"(\d+)"')
_COST = re.compile(r'"reification_cost":(\[[^\]]+\])')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"\d+"\}')
_METADATA = re.compile(r", metadata=\{(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\"|\{[^{}]*\})*\}")
_CONFIG = re.compile(r", backend_config=(\{.*\}|\"(?:[^\"\\]|\\.)*\")(?=,|$)", re.M)


class Costed(NamedTuple):
    """A step that XLA has compiled for a chip that is not there.

    Attributes:
      chip: a name of `jaxmem.targets()`.
      name: of the step.
      module: its text.
    """

    chip: str
    name: str
    module: str


def costed(folder: pathlib.Path) -> Iterator[Costed]:
    """The steps of a folder."""
    for path in sorted(folder.glob("*.json.gz")):
        with gzip.open(path, "rt") as file:
            yield Costed(*json.load(file))


def keep(step: Costed, folder: pathlib.Path) -> None:
    """Writes a step without what predictions do not need."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = re.sub(r"\W+", "-", f"{step.chip} {step.name}".lower())
    text = _METADATA.sub("", TABLES.sub("", step.module))
    if step.chip.startswith("tpu"):
        text = _CONFIG.sub(_kept, text)
    pack(folder / f"{plain}.json.gz", step._replace(module=text))


def _kept(config: re.Match) -> str:
    fields = (one.search(config[1]) for one in (_ESTIMATED, _TRIPS))
    found = [one.group() for one in fields if one]
    return f", backend_config={{{','.join(found)}}}" if found else ""


def by_cost(hlo: Hlo, kernel: TimedKernel) -> float:
    """One run of a GPU's kernel by XLA's model; 0 where it does not say."""
    # It has a second one, "sol", that knows large products better and no Triton.
    said = _COST.search(hlo.instruction(kernel.name).attributes)
    costs = json.loads(said[1]) if said else []
    return next((1e-6 * float(c["exec_time_us"]) for c in costs if not c["name"]), 0.0)


def by_cycles(hlo: Hlo, kernel: TimedKernel, rates: Rates) -> float:
    """One run of an operation by XLA's cycles; 0 where it does not say."""
    said = _ESTIMATED.search(hlo.instruction(kernel.name).attributes)
    return int(said[1]) / rates.clock if said else 0.0
