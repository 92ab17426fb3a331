"""Jobs in processes of their own: what a crash, a hang and a stop leave behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.device import results
from benchmarks.device.job import Job
from benchmarks.device.runner import ROOT, Runner
from tests.device.jobs import jobs

MACHINE = {"chip": "h100", "driver": "1.2", "jax": "0.10", "memory": 2**32}
SOURCE = "tests.device.jobs"


@pytest.fixture
def runner(tmp_path):
    return Runner(MACHINE, results.path_for(MACHINE, tmp_path), False, SOURCE)


@pytest.mark.slow
def test_each_way_to_end_is_a_line(runner, capsys):
    """One crash, hang or refusal spoils one row; the rows before it are kept."""
    assert runner.run(list(jobs().values()))
    seen = results.read(runner.path)
    ends = {
        name: (record["status"], len(record["rows"])) for name, record in seen.items()
    }
    assert ends == {
        "right: well": ("done", 2),
        "right: killed": ("crashed", 1),
        "fast: hanging": ("timed out", 1),
        "fast: raising": ("failed", 1),
        "true: lacking": ("not here", 0),
        "true: under": ("not here", 0),
    }
    assert seen["right: well"]["rows"][1]["share"] == "0.2500"
    assert seen["right: killed"]["reason"] == "SIGSEGV"
    output = seen["fast: raising"]["output"]
    assert output[-1] == "RuntimeError: an illegal access"
    assert str(ROOT) not in "".join(output)
    assert seen["true: lacking"]["reason"] == "torch is not installed"
    assert "no-such-program is not installed" in capsys.readouterr().out


@pytest.fixture
def told(monkeypatch):
    """No processes: the names of the jobs that are run, in order."""
    names = []

    def run_one(self, job, limit):
        names.append(job.name)
        return self.record(job, "done", "", 1.0)

    monkeypatch.setattr(Runner, "run_one", run_one)
    return names


def line(job, status, rows=()):
    return {"job": job, "status": status, "rows": list(rows), "machine": MACHINE}


def test_what_is_done_is_left_and_what_has_failed_comes_last(runner, told):
    results.append(runner.path, line("right: well", "done"))
    results.append(runner.path, line("fast: hanging", "timed out"))
    runner.run(list(jobs().values()))
    assert told[0] == "right: killed" and told[-1] == "fast: hanging"
    assert "right: well" not in told and len(told) == len(jobs()) - 1


def test_the_most_valuable_a_second_is_first(runner, told):
    make = lambda name, value, seconds: Job(name, None, seconds, value)
    runner.run([make("a", 1, 1), make("b", 9, 3), make("c", 4, 1)])
    assert told == ["c", "b", "a"]
    runner.run([make("a", 1, 1), make("b", 9, 3)], again=True)
    assert told[3:] == ["b", "a"]


def test_no_job_begins_that_would_pass_the_end(runner, told):
    """A shorter one may still fit."""
    long, short = Job("long", None, 100, 1e4), Job("short", None, 5)
    assert not runner.run([long, short], seconds=20)
    assert told == ["short"]


@pytest.mark.slow
def test_a_stop_keeps_what_was_found_and_the_command_goes_on(tmp_path):
    """Here by SIGTERM, as a machine that is taken back sends it."""
    where = ["--small", "--folder", str(tmp_path), "--source", SOURCE]
    command = [sys.executable, "-m", "benchmarks.device", *where, "--only", "hanging"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    end = time.monotonic() + 60
    while not _answered(tmp_path) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130
    (path,) = tmp_path.glob("*.jsonl")
    (record,) = results.read(path).values()
    assert (record["status"], record["rows"]) == ("stopped", [{"n": 1}])
    todo = Runner(record["machine"], path).left(list(jobs().values()))
    assert todo[-1].name == "fast: hanging" and len(todo) == len(jobs())


def _answered(folder) -> bool:
    return any(path.read_text() for path in folder.rglob("answers"))
