"""The GitHub action: its script passes what the command takes, and its exit code on."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

import jaxmem
from tests.cli.invoking import invoke
from tests.diffing.steps import SOURCE

yaml = pytest.importorskip("yaml")

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "actions" / "check"
ACTION = yaml.safe_load((FOLDER / "action.yml").read_text())
INSTALL, COMPARE = ACTION["runs"]["steps"]
RECORDER = '#!/bin/sh\nprintf "%s\\n" "$@" > asked.txt\necho table\nexit 1\n'


def _run(tmp_path, **inputs):
    """Runs the script of the last step with a `jaxmem` that notes what it was asked."""
    (tmp_path / "jaxmem").write_text(RECORDER)
    (tmp_path / "jaxmem").chmod(0o755)
    env = {name: "" for name in COMPARE["env"]} | inputs
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_STEP_SUMMARY": "s.md"}
    command = ["bash", "-c", COMPARE["run"]]
    how = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True}
    return subprocess.run(command, **how)


def test_it_is_a_composite_action_with_every_input_used():
    assert ACTION["runs"]["using"] == "composite"
    text = (FOLDER / "action.yml").read_text()
    assert all(f"${{{{ inputs.{name} }}}}" in text for name in ACTION["inputs"])
    assert all("description" in one for one in ACTION["inputs"].values())
    assert (FOLDER / "../../.." / "pyproject.toml").resolve() == ROOT / "pyproject.toml"
    assert "$ACTION/../../.." in INSTALL["run"]


def test_what_it_asks_is_what_the_command_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "actions_train.py").write_text(SOURCE)
    step = "actions_train:plain"
    assert invoke("estimate", step, "--json", "base.json").exit_code == 0
    limits = {"MAX": "1GiB", "MAX_GROWTH": "1%", "TARGET": "cpu"}
    done = _run(tmp_path, STEP=step, BASELINE="base.json", **limits)
    assert done.returncode == 1 and done.stdout == "table\n"
    assert "table" in (tmp_path / "s.md").read_text()
    asked = (tmp_path / "asked.txt").read_text().splitlines()
    assert invoke(*asked).exit_code == 0
    more = [*asked[:2], "actions_train:remat", *asked[3:-1], "0%"]
    assert invoke(*more).exit_code == 0  # it takes less
    small = jaxmem.estimate(lambda x: x, jax.ShapeDtypeStruct((1,), "float32"))
    small.save(tmp_path / "base.json")
    assert invoke(*asked).exit_code == 1


def test_a_commit(tmp_path):
    _run(tmp_path, STEP="train:step", COMMIT="main", MAX_MS="3")
    asked = (tmp_path / "asked.txt").read_text().split()
    assert asked == ["diff", "train:step", "--commit-a", "main", "--max-ms", "3"]


@pytest.mark.parametrize("both", [{}, {"BASELINE": "a.json", "COMMIT": "main"}])
def test_one_of_baseline_and_commit_is_needed(tmp_path, both):
    done = _run(tmp_path, STEP="train:step", **both)
    assert done.returncode == 2 and "a baseline or a commit" in done.stderr
