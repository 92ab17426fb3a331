"""Jobs that end in every way a job can, for the tests of the runner."""

import os
import signal
import time

from benchmarks.device.job import Job, NotHere


def well(small):
    yield {"n": 1, "small": small}
    yield {"n": 2, "share": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")}


def killed(small):
    yield {"n": 1}
    os.kill(os.getpid(), signal.SIGSEGV)
    yield {"n": 2}


def hanging(small):
    yield {"n": 1}
    time.sleep(600)
    yield {"n": 2}


def raising(small):
    yield {"n": 1}
    raise RuntimeError("an illegal access")


def lacking(small):
    raise NotHere("torch is not installed")
    yield {}


def jobs():
    found = (
        Job("right: well", well, seconds=1, memory=2**30),
        Job("right: killed", killed, seconds=2),
        Job("fast: hanging", hanging, seconds=2, limit=12, value=9),
        Job("fast: raising", raising, seconds=3),
        Job("true: lacking", lacking, seconds=4),
        Job("true: under", well, seconds=5, under=("no-such-program",)),
    )
    return {job.name: job for job in found}
