"""The lines of jobs: one JSON object each, in a file of the chip and the versions.

Lines are only ever added. What is read of a job is its best line: a success replaces
what was there, a failure never replaces a success.
"""

import json
import os
import pathlib
import re
from typing import Any

from benchmarks._common import RESULTS

Record = dict[str, Any]
DONE = "done"


def path_for(machine: Record, folder: pathlib.Path = RESULTS) -> pathlib.Path:
    """Where the lines of a machine are."""
    chip, driver, jax = (
        re.sub(r"[^A-Za-z0-9._]+", "_", str(machine[what]))
        for what in ("chip", "driver", "jax")
    )
    return folder / f"device-{chip}-driver{driver}-jax{jax}.jsonl"


def append(path: pathlib.Path, record: Record) -> None:
    """Adds a line, which is on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():  # a line that a stop has cut in two is left behind
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: pathlib.Path) -> dict[str, Record]:
    """The best line of each job."""
    best: dict[str, Record] = {}
    for record in _lines(path):
        old = best.get(record["job"])
        if old is None or _rank(record) >= _rank(old):
            best[record["job"]] = record
    return best


def _lines(path: pathlib.Path) -> list[Record]:
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut in two by a stop
        if isinstance(record, dict) and "job" in record:
            found.append(record)
    return found


def _rank(record: Record) -> tuple[bool, int]:
    """The larger replaces; of failures one with as many rows or more."""
    done = record["status"] == DONE
    return done, 0 if done else len(record["rows"])


def every(folder: pathlib.Path = RESULTS) -> list[tuple[Record, dict[str, Record]]]:
    """(machine, its jobs' best lines) of all files."""
    found = []
    for path in sorted(folder.glob("device-*.jsonl")):
        jobs = read(path)
        if jobs:
            machine = next(iter(jobs.values()))["machine"]
            found.append((machine, jobs))
    return found
