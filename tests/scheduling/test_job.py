"""`examples/two_processes.py`: two processes, one search, kills and restarts."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.test_way_in import ROOT

STEPS = 7
KILLS = (1, 3), (0, 5)  # a process before a step, in one start of the job after another
HEARTBEAT = 10  # seconds, as the example has it
SLACK = 20  # seconds, on a machine that does much else


def run(folder, *options: str) -> tuple[int, str]:
    """How a job ends, and what it prints."""
    script = ROOT / "examples" / "two_processes.py"
    command = [sys.executable, str(script), "--folder", str(folder)]
    job = subprocess.Popen(
        [*command, "--steps", str(STEPS), *options],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        text = job.communicate(timeout=500)[0]
    finally:
        if job.poll() is None:  # with its processes
            os.killpg(job.pid, signal.SIGKILL)
    return job.returncode, text


def trained(folder, *options: str) -> str:
    """What a job prints that does all its steps."""
    code, text = run(folder, *options)
    assert code == 0, text + logs(folder)
    return text


def logs(folder) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("*.log")))


def losses(text: str) -> list[tuple[int, str]]:
    """Steps and their losses, every digit of them."""
    found = re.findall(r"step (\d+): loss ([\d.]+)", text)
    return [(int(number), loss) for number, loss in found]


@pytest.mark.slow
def test_killed_processes_and_restarts(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path / "cache"))
    kills = [f"{process}:{step}" for process, step in KILLS]
    text = trained(tmp_path / "killed", "--kill", *kills)
    want = dict(losses(trained(tmp_path / "whole", "--kill")))
    assert [*want] == [*range(STEPS)]
    assert float(want[STEPS - 1]) < float(want[0])

    starts = text.split("once more, from the last checkpoint")
    assert len(starts) == 1 + len(KILLS)
    # each goes on after a checkpoint, to the next kill or the end, with equal losses
    ends = [step for _, step in KILLS] + [STEPS]
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        steps = [step for step, _ in losses(start)]
        assert steps == [*range(steps[0], end)]
        assert (steps[0] == 0) == (number == 0)
        assert all(want[step] == loss for step, loss in losses(start))

    # the other one does not wait for who is gone; it says what has failed, unless jax,
    # whose service is gone with process 0, ends it before
    for start, (process, _) in zip(starts, KILLS, strict=False):
        survivor = 1 - process
        if process > 0:
            assert f"process {survivor} has failed: JaxRuntimeError:" in start
        ended = dict(re.findall(r"process (\d) ended by (.*) s after the first", start))
        assert ended[str(process)].startswith("SIGKILL")
        how, seconds = ended[str(survivor)].split(", ")
        assert how == "SIGABRT" and float(seconds) < HEARTBEAT + SLACK
    # jax names it
    assert re.search(r"stopped sending heartbeats\):\n1\n", logs(tmp_path / "killed"))
    assert "leader task" in logs(tmp_path / "killed")

    # one search for all processes and all starts
    plans = re.findall(r"process (\d): plan (.*)", starts[-1])
    assert {process for process, _ in plans} == {"0", "1"}
    assert len({plan for _, plan in plans}) == 1

    # the plan of another step is refused in each process, and nobody waits
    path = tmp_path / "killed" / "plan.json"
    other = path.read_text().replace(plans[0][1].split(",")[0], "0")
    path.write_text(other)
    code, text = run(tmp_path / "killed", "--kill", "--steps", str(STEPS + 1))
    assert code == 1
    refused = r"process (\d) has failed: ValueError: plan: made for another step \(0\)"
    assert {*re.findall(refused, text)} == {"0", "1"}
