"""XLA's own cycles of steps for TPUs, and their modules, kept in results/.

libtpu writes `estimated_cycles` into the configuration of most operations, one run
each: a loop's have to be multiplied by its trips. Not estimated are asynchronous copies
and operations on a few numbers. Source lines, names and the rest of configurations are
left out of what is kept, and with them the paths of a machine.
"""

import gzip
import json
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks._common import RESULTS
from benchmarks._traces import TABLES, pack
from jaxmem.chips import Rates
from jaxmem.memory.buffers.hlo import Hlo
from jaxmem.memory.time.schedule import TimedKernel

CYCLES = RESULTS / "cycles-jax0.10.2"
_ESTIMATED = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"\d+"\}')
_METADATA = re.compile(r", metadata=\{(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\"|\{[^{}]*\})*\}")
_CONFIG = re.compile(r", backend_config=(\{.*\}|\"(?:[^\"\\]|\\.)*\")(?=,|$)", re.M)


class Costed(NamedTuple):
    """A step that XLA has compiled for a TPU.

    Attributes:
      chip: a name of `jaxmem.targets()`.
      name: of the step.
      module: its text.
    """

    chip: str
    name: str
    module: str


def costed(folder: pathlib.Path = CYCLES) -> Iterator[Costed]:
    """The steps of a folder."""
    for path in sorted(folder.glob("*.json.gz")):
        with gzip.open(path, "rt") as file:
            yield Costed(*json.load(file))


def keep(step: Costed, folder: pathlib.Path = CYCLES) -> None:
    """Writes a step without what predictions do not need."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = re.sub(r"\W+", "-", f"{step.chip} {step.name}".lower())
    pack(folder / f"{plain}.json.gz", step._replace(module=bare(step.module)))


def bare(module: str) -> str:
    """A module's text without names, source lines, and most of its configurations."""
    text = _METADATA.sub("", TABLES.sub("", module))
    return _CONFIG.sub(_kept, text)


def _kept(config: re.Match) -> str:
    fields = (one.search(config[1]) for one in (_ESTIMATED, _TRIPS))
    found = [one.group() for one in fields if one]
    return f", backend_config={{{','.join(found)}}}" if found else ""


def seconds_of(hlo: Hlo, kernel: TimedKernel, rates: Rates) -> float:
    """One run of an operation by XLA's cycles; 0 where it does not say."""
    said = _ESTIMATED.search(hlo.instruction(kernel.name).attributes)
    return int(said[1]) / rates.clock if said else 0.0
