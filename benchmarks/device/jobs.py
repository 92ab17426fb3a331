"""All jobs, by name: a piece is a module with `jobs()`."""

from collections.abc import Iterable

from benchmarks.device import (
    checked,
    cudnn,
    fast,
    forms,
    offload,
    rates,
    right,
    seconds,
    steps,
    true,
)
from benchmarks.device.job import Job

PIECES = (seconds, rates, cudnn, offload, right, fast, true, steps, checked, forms)


def jobs() -> dict[str, Job]:
    return by_name(job for piece in PIECES for job in piece.jobs())


def by_name(jobs: Iterable[Job]) -> dict[str, Job]:
    """Raises ValueError for a name that two have: the file keeps one line of each."""
    found: dict[str, Job] = {}
    for job in jobs:
        if job.name in found:
            raise ValueError(f"two jobs are called {job.name!r}")
        found[job.name] = job
    return found
