"""The assertion, the fixture, and that the plugin costs pytest nothing."""

import json
import os
import pathlib
import subprocess
import sys
import tomllib

import pytest

import jaxmem
from jaxmem.testing import assert_memory
from tests.diffing.steps import SOURCE, plain, remat

ROOT = pathlib.Path(__file__).parents[2]


def _checked(made, **limits):
    step, args, options = made
    return assert_memory(step, *args, **options, **limits)


def test_a_baseline_is_written_and_compared_with(tmp_path):
    path = tmp_path / "folder" / "step.json"
    with pytest.raises(AssertionError, match="no baseline .*step.json: write it"):
        _checked(remat(), baseline=path)
    report = _checked(remat(), baseline=path, update=True)
    assert jaxmem.memory.MemoryReport.from_json(path.read_text()).timeline == ()
    assert _checked(remat(), baseline=path).peak_bytes == report.peak_bytes
    assert _checked(plain(), baseline=path, max_growth=10.0)
    with pytest.raises(AssertionError) as error:
        _checked(plain(), baseline=path)
    said = str(error.value)
    assert said.startswith("the peak has grown by") and "appeared at the peak" in said


def test_limits_without_a_baseline():
    _checked(remat(), max_bytes="1GiB")
    with pytest.raises(
        AssertionError, match=r"the peak takes .*, more than 1.00 KiB\n"
    ):
        _checked(remat(), max_bytes="1KiB")
    with pytest.raises(ValueError, match="max_ms=3: no seconds are predicted for cpu"):
        _checked(remat(), max_ms=3)


def test_what_is_no_limit_and_no_baseline(tmp_path):
    with pytest.raises(TypeError, match="max_bytes=None: a limit"):
        _checked(remat())
    with pytest.raises(ValueError, match="baseline='x.txt': a file that ends in .json"):
        _checked(remat(), baseline="x.txt")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match="a.json': the path of a report"):
        _checked(remat(), baseline=tmp_path / "a.json")


def test_a_baseline_of_another_chip_is_refused(tmp_path):
    _checked(remat(), baseline=tmp_path / "a.json", update=True)
    fields = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(fields | {"target": "h100"}))
    with pytest.raises(ValueError, match="for cpu, not for h100"):
        _checked(remat(), baseline=tmp_path / "a.json")


def test_the_plugin_loads_nothing_of_jax():
    """pytest imports it in every run of every project that has jaxmem installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (module,) = project["entry-points"]["pytest11"].values()
    code = f"import {module}, sys; print(*{{m.partition('.')[0] for m in sys.modules}})"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "jaxmem" in done.stdout.split()
    assert not {"jax", "jaxlib", "numpy", "flax"} & {*done.stdout.split()}


TEST = """
def test_step(memory_baseline):
    step, args, options = made(KEEP)
    memory_baseline(step, *args, max_bytes="1GiB", **options)
"""


@pytest.mark.slow
def test_the_fixture(tmp_path):
    pytest_alone = [sys.executable, "-m", "pytest", "-q", "-p", "jaxmem.testing.plugin"]

    def run(keep, *options):
        (tmp_path / "test_it.py").write_text(f"KEEP = {keep}\n{SOURCE}\n{TEST}")
        command = [*pytest_alone, "-p", "no:cacheprovider", *options, str(tmp_path)]
        env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return subprocess.run(command, capture_output=True, text=True, env=env)

    assert "no baseline" in run(False).stdout
    assert run(False, "--update-memory-baselines").returncode == 0
    assert (tmp_path / "memory_baselines" / "test_it.test_step.json").is_file()
    assert run(False).returncode == 0
    done = run(True)
    assert done.returncode == 1 and "the peak has grown by" in done.stdout
