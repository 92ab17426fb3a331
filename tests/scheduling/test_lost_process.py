"""A process is killed while it searches: those that wait for its plan end, and say so.

Real processes, since what jax does when one of them is gone is what matters.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest

from jaxmem.scheduling.search import heartbeat, in_job
from tests.test_way_in import ROOT

HEARTBEAT = 10  # seconds: the least that jax takes
SILENCE = 4.0  # seconds, for our own
START = 60  # seconds in which processes start, on a machine that does much else


def wait_for(victim: int) -> None:
    """Process `victim` is killed in its search, the other waits for its plan."""

    def search():
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)

    in_job.in_job("key", "step", {}, lambda choice: None, search, victim)


def main(port: str, process: str, victim: str, recoverable: str) -> None:
    """What each of the processes runs."""
    if recoverable == "True":
        jax.config.update("jax_enable_recoverability", True)
        heartbeat._EVERY, heartbeat.SILENCE = 0.5, SILENCE
    jax.distributed.initialize(
        f"localhost:{port}", 2, int(process), heartbeat_timeout_seconds=HEARTBEAT
    )
    try:
        wait_for(int(victim))
    except RuntimeError as error:
        print(f"told: {error}", flush=True)
        os._exit(3)


def lost(victim: int, recoverable: bool) -> tuple[int, str, float]:
    """How the survivor ended, what it said, and seconds after the kill."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    run = [sys.executable, "-m", "tests.scheduling.test_lost_process", str(port)]
    jobs = [
        subprocess.Popen(
            [*run, str(i), str(victim), str(recoverable)],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        assert jobs[victim].wait(START) == -signal.SIGKILL
        killed = time.monotonic()
        text = jobs[1 - victim].communicate(timeout=START)[0]
        return jobs[1 - victim].returncode, text, time.monotonic() - killed
    finally:
        for job in jobs:
            job.kill()
            job.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim, says",
    [
        (1, r"unhealthy \(stopped sending heartbeats\):\n1\n"),
        (0, r"leader task|told: process 0 is gone"),
    ],
    ids=["another", "the first"],
)
def test_jax_ends_who_waits(victim, says):
    code, text, seconds = lost(victim, recoverable=False)
    assert code in (-signal.SIGABRT, 3), text
    assert re.search(says, text), text
    assert seconds < HEARTBEAT + 10


@pytest.mark.slow
def test_where_jax_does_not_we_do():
    """With its recoverable processes."""
    code, text, seconds = lost(1, recoverable=True)
    assert code == 3, text
    assert re.search(r"told: schedule of step: process 1 \(.*, pid \d+\) has", text)
    assert seconds < SILENCE + 10


if __name__ == "__main__":
    main(*sys.argv[1:])
