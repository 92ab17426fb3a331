"""The faults of CPUs, as this version of jax runs the programs."""

import json
import os
import subprocess
import sys

import pytest

from jaxmem.faults import FAULTS, standing
from tests.faults import programs

BY_REPORT = {fault.report: fault for fault in FAULTS}


@pytest.fixture(scope="module")
def found():
    """What a process of its own makes of them: the tests turn XLA down."""
    flags = "--xla_force_host_platform_device_count=4"
    environ = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.faults.runs"]
    how = {"capture_output": True, "text": True, "env": environ, "check": False}
    done = subprocess.run(command, **how)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def is_affected(report):
    told = standing(BY_REPORT[report], "cpu")
    if told == "not checked yet":
        pytest.skip(f"{report}: this version was not looked at")
    return told == "affected"


def test_an_update_of_what_is_still_to_be_read(found):
    """All rows but the first two, which stay what they are, are wrong."""
    rows, width = programs.ROWS.shape
    wrong = (rows - 2) * width if is_affected("xla#49176") else 0
    assert found["moved"] == wrong and found["joined"] == 0


def test_a_donated_array_that_a_loop_reads(found):
    size = 4 * programs.SIZE
    copied = is_affected("xla#45912")
    assert (found["between"] >= size) == copied
    assert found["between"] < size + 2**12 and found["before"] < 2**12


def test_small_updates_of_a_large_array(found):
    """The array is 256 times as large; what is written in the loop is the same."""
    assert (found["slower"] > 30) == is_affected("jax#40101")


def test_rows_of_a_reduced_table(found):
    """Sixteen numbers of about 1 at most are added: CPUs have not got this fault."""
    assert found["reduced"] < 16 * 2**-23 * 16
