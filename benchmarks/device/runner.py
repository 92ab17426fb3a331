"""Runs jobs, one process each with its own limit, and adds a line after each."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from benchmarks._common import commit
from benchmarks.device import results
from benchmarks.device.job import Job
from benchmarks.device.results import DONE, Record

ROOT = pathlib.Path(__file__).parent.parent.parent
KEPT = 30  # lines of the output of a job that failed
NOT_HERE = "not here"
STOPPED = "stopped"


class Stop(Exception):
    """An interrupt, with the line of the job that it met."""

    def __init__(self, record: Record):
        super().__init__("stopped")
        self.record = record


@dataclass(frozen=True)
class Runner:
    """How jobs are run.

    Attributes:
      machine: of what `machine.describe` gives.
      path: of the lines.
      small: tiny sizes.
      source: the module whose `jobs()` has the jobs.
    """

    machine: Record
    path: pathlib.Path
    small: bool = False
    source: str = "benchmarks.device.jobs"

    def run(
        self, jobs: Sequence[Job], seconds: float | None = None, again: bool = False
    ) -> bool:
        """Runs what is not done, or all of it; False if there was no time for all.

        A job that would pass the end by what it takes roughly is left for later, and
        none may pass it.
        """
        end = time.monotonic() + (float("inf") if seconds is None else seconds)
        whole = True
        for job in sorted(jobs, key=_worth) if again else self.left(jobs):
            room = end - time.monotonic()
            expected = min(job.seconds, job.limit)
            if room < (1 if self.small else expected):
                whole = False
                continue
            try:
                record = self.run_one(job, min(job.limit, room))
            except Stop as stop:
                self.keep(stop.record)
                raise KeyboardInterrupt from stop
            self.keep(record)
        return whole

    def left(self, jobs: Sequence[Job]) -> list[Job]:
        """Those that are not done, the most valuable first; at last what has failed."""
        seen = results.read(self.path)
        todo = [j for j in jobs if seen.get(j.name, {}).get("status") != DONE]
        return sorted(todo, key=lambda job: (job.name in seen, -job.worth))

    def keep(self, record: Record) -> None:
        results.append(self.path, record)
        what = f" ({record['reason']})" if record["reason"] else ""
        rows = f"{len(record['rows'])} rows, {record['seconds']:.0f} s"
        print(f"{record['job']}: {record['status']}{what}, {rows}", flush=True)

    def run_one(self, job: Job, limit: float) -> Record:
        """A job's line."""
        if job.under and shutil.which(job.under[0]) is None:
            reason = f"{job.under[0]} is not installed"
            return self.record(job, NOT_HERE, reason, 0.0)
        with tempfile.TemporaryDirectory() as folder:
            return self._in_a_process(job, limit, pathlib.Path(folder))

    def _in_a_process(self, job: Job, limit: float, folder: pathlib.Path) -> Record:
        answers, log = folder / "answers", folder / "log"
        begin = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                self.command(job, answers),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=self.environment(job),
                start_new_session=True,
            )
            status, reason, stopped = _ended(process, limit)
        rows, said = _answers(answers)
        status, reason = said or (status, reason)
        seconds = time.monotonic() - begin
        output = [] if status == DONE else _last(log)
        record = self.record(job, status, reason, seconds, rows, output)
        if stopped:
            raise Stop(record)
        return record

    def command(self, job: Job, answers: pathlib.Path) -> list[str]:
        small = ["--small"] if self.small or job.small else []
        where = ["--answers", str(answers), "--source", self.source]
        asked = ["--job", job.name, *where, *small]
        return [*job.under, sys.executable, "-m", "benchmarks.device", *asked]

    def environment(self, job: Job) -> dict[str, str]:
        """With what share of the device the process may take."""
        whole = self.machine.get("memory")
        if not (job.memory and whole):
            return dict(os.environ)
        share = f"{job.memory / whole:.4f}"
        return os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": share}

    def record(
        self, job: Job, status: str, reason: str, seconds: float, rows=(), output=()
    ) -> Record:
        return {
            "job": job.name,
            "status": status,
            "reason": reason,
            "seconds": round(seconds, 1),
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": _commit(),
            "small": self.small,
            "machine": self.machine,
            "rows": list(rows),
            "output": list(output),
        }


def _commit() -> str:
    """That of the working tree; a copy may come without its history."""
    try:
        return commit()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _worth(job: Job) -> float:
    return -job.worth


def _ended(process: subprocess.Popen, limit: float) -> tuple[str, str, bool]:
    """(status, reason, whether an interrupt came) when the process has ended."""
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        _end(process)
        return "timed out", f"after {limit:.0f} s", False
    except KeyboardInterrupt:
        _end(process)
        return STOPPED, "", True
    if code < 0:
        return "crashed", signal.Signals(-code).name, False
    return (DONE, "", False) if code == 0 else ("failed", f"exit status {code}", False)


def _end(process: subprocess.Popen) -> None:
    """Ends what was started here, and what that has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
        process.wait(30)


def _answers(path: pathlib.Path) -> tuple[list[Record], tuple[str, str] | None]:
    """The rows, and what the job says of itself where it could not be done."""
    rows, said = [], None
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            answer = json.loads(line)
        except json.JSONDecodeError:
            continue  # the process was ended while it wrote
        if NOT_HERE in answer:
            said = NOT_HERE, answer[NOT_HERE]
        else:
            rows.append(answer)
    return rows, said


def _last(log: pathlib.Path) -> list[str]:
    """The end of the output, without the paths of who ran it."""
    text = log.read_bytes().decode(errors="replace")
    for path in (str(ROOT), sys.prefix, str(pathlib.Path.home())):
        text = text.replace(path, "...")
    return [line[:300] for line in text.splitlines()[-KEPT:]]
