"""The page of the command line is made from the help, and its example works."""

import importlib.util
import json
import pathlib
import re
import sys

import jax
import pytest

import jaxmem
from jaxmem.cli import EXIT_CODES
from tests.cli.invoking import invoke

ROOT = pathlib.Path(jaxmem.__file__).parents[1]
PAGE = ROOT / "docs" / "command_line.md"


def _commands():
    spec = importlib.util.spec_from_file_location("commands", ROOT / "docs/commands.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_commands_are_those_of_the_help():
    text = PAGE.read_text()
    assert _commands().written(text) == text, "python docs/commands.py writes them"
    titles = re.findall(r"^## jaxmem ([\w-]+)$", text, re.MULTILINE)
    assert titles[0] == "estimate" and titles[-1] == "layout" and len(titles) == 15
    assert all(f"| {code} | " in text for code in EXIT_CODES)
    for option in ("--args", "--max", "--json", "--plot", "--min", "--traceback"):
        assert f"`{option}" in text


@pytest.fixture
def example(steps):
    text = PAGE.read_text()
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", text, re.S) if "tx =" in c]
    (steps / "train.py").write_text(code)
    (lines,) = [c for c in re.findall(r"```sh\n(.*?)```", text, re.S) if "train:" in c]
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        yield [line.split()[1:] for line in lines.splitlines()]
    sys.modules.pop("train", None)


def test_the_example_traces(example, steps):
    """Those of its commands that compile nothing; without a chip, plan is one."""
    traced = ("residuals", "plan", "lint", "ledger")
    lines = {words[0]: words for words in example}
    for name in traced:
        words = [w for w in lines[name] if w not in ("--target", "h100")]
        result = invoke(*words, "--json", f"{name}.json")
        assert result.exit_code == 0, result.output
    plan = json.loads((steps / "plan.json").read_text())
    assert sum(g["bytes"] for g in plan["gradients"] if g["released"]) == 2**20
    # 4 x 256 x 256 weights in float32, their gradients and two moments
    ledger = json.loads((steps / "ledger.json").read_text())
    assert sum(row["device_bytes"] for row in ledger["rows"]) == 4 * 2**20


@pytest.mark.slow
def test_the_example_runs(example):
    for words in example:
        result = invoke(*words)
        assert result.exit_code == 0, result.output
