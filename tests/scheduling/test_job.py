"""`examples/two_processes.py`: two processes, one search, a kill and a restart."""

import re
import subprocess
import sys

import pytest

from tests.test_way_in import ROOT

STEPS, KILL_AT = 6, 4
ROUNDING = 2e-5  # of sums over 4 devices in another order, six steps of AdamW long


def trained(folder, *options: str) -> str:
    """What a job prints."""
    script = ROOT / "examples" / "two_processes.py"
    command = [sys.executable, str(script), "--folder", str(folder)]
    done = subprocess.run(
        [*command, "--steps", str(STEPS), *options],
        stdout=subprocess.PIPE,
        text=True,
        timeout=500,
    )
    logs = (path.read_text() for path in folder.glob("*.log"))
    assert done.returncode == 0, done.stdout + "".join(logs)
    return done.stdout


def losses(text: str) -> dict[int, float]:
    """By step; of the last time that a step was made."""
    found = re.findall(r"step (\d+): loss ([\d.]+)", text)
    return {int(number): float(loss) for number, loss in found}


@pytest.mark.slow
def test_a_killed_process_and_a_restart(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path / "cache"))
    text = trained(tmp_path / "two", "--kill-at", str(KILL_AT))
    one = trained(tmp_path / "one", "--processes", "1", "--kill-at", "-1")
    before, after = text.split("once more, from the last checkpoint")
    # the restart went on from a checkpoint, and made the killed step again
    assert 0 < min(losses(after)) <= KILL_AT
    assert max(losses(after)) == STEPS - 1
    want = losses(one)
    assert want[STEPS - 1] < want[0]
    for number, loss in (losses(before) | losses(after)).items():
        assert loss == pytest.approx(want[number], rel=ROUNDING)
    # one search: both processes tell the seconds of the same one
    plans = re.findall(r"process (\d): plan found by (.*)", after)
    assert {process for process, _ in plans} == {"0", "1"}
    assert len({found for _, found in plans}) == 1
