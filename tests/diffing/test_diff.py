"""Two steps, two commits, two interpreters: what changed is told."""

import json
import os
import re
import subprocess
import sys

import jax
import pytest

import jaxmem
from jaxmem.diffing import exceeded
from tests.diffing.steps import SOURCE, made, plain, remat

OTHER_PYTHON = "JAXMEM_OTHER_PYTHON"  # one with another jax, and jaxmem installed


@pytest.fixture(scope="module")
def reports():
    steps = remat(), plain()
    return [jaxmem.estimate(step, *args, **how) for step, args, how in steps]


def test_what_appeared_and_what_was_compiled(reports):
    found = jaxmem.diff(*reports)
    rows = found.sections["appeared at the peak"]
    assert all(row.before == 0 < row.after for row in rows)
    # tanh of both products, stacked over the layers
    stacked = [row for row in rows if "f32[3,128,16]" in row.name]
    assert stacked and all(row.name.startswith("mlp: ") for row in stacked)
    counts = found.sections["compiled instructions"]
    assert {row.unit for row in counts} == {"count"}
    total = lambda report: sum(i.count for i in report.instructions)
    assert sum(row.difference for row in counts) == total(reports[1]) - total(
        reports[0]
    )
    back = jaxmem.diff(*reversed(reports))
    gone = {(row.name, row.before) for row in back.sections["gone from the peak"]}
    assert gone == {(row.name, row.after) for row in rows}


def test_reports_of_steps_and_of_files(reports, tmp_path):
    reports[0].save(tmp_path / "base.json")
    of_file = jaxmem.diff(tmp_path / "base.json", plain())
    assert (
        of_file.sections["totals"] == reports[0].compare(reports[1]).sections["totals"]
    )


def test_one_step_with_other_arguments():
    """Arrays are not compared: two of them are no truth value."""

    def step(x):
        return (x @ x.T).sum()

    small, large = ((step, (jax.numpy.ones((n, 4)),)) for n in (8, 64))
    found = jaxmem.diff(small, large)
    (peak,) = (row for row in found.sections["totals"] if row.name == "peak")
    assert peak.after > peak.before


def test_an_older_report_has_no_instructions(reports, tmp_path):
    fields = json.loads(reports[0].to_json())
    del fields["instructions"]
    (tmp_path / "old.json").write_text(json.dumps(fields))
    found = jaxmem.diff(str(tmp_path / "old.json"), reports[1])
    assert "compiled instructions" not in found.sections


def _git(*words):
    how = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *how, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Two commits: `step` keeps nothing in the first, and everything in the second."""
    monkeypatch.chdir(tmp_path)
    _git("init", "-q")
    for keep in (False, True):
        text = f"{SOURCE}\ndef step():\n    print('loaded')\n    return made({keep})\n"
        (tmp_path / "train.py").write_text(text)
        _git("add", ".")
        _git("commit", "-q", "-m", str(keep))
    return tmp_path


@pytest.mark.slow
def test_two_commits(repository, reports):
    found = jaxmem.diff("train:step", commit_a="HEAD~1")
    assert [r.peak_bytes for r in found.reports] == [r.peak_bytes for r in reports]
    listed = subprocess.check_output(["git", "worktree", "list"], text=True)
    assert len(listed.splitlines()) == 1  # the checkout is gone


def test_a_module_of_another_place_than_the_checkout_is_refused(repository):
    (repository / "elsewhere").mkdir()
    (repository / "elsewhere" / "model.py").write_text("")
    folder = str(repository / "elsewhere")
    text = f"import sys; sys.path.append({folder!r}); import model\n"
    (repository / "train.py").write_text(text + (repository / "train.py").read_text())
    _git("add", "train.py")
    _git("commit", "-q", "-m", "imports")
    with pytest.raises(
        ValueError, match=r"model\.py was imported.*not in the checkout"
    ):
        jaxmem.diff("train:step", commit_a="HEAD")


@pytest.mark.slow
def test_two_interpreters(repository):
    found = jaxmem.diff("train:step", python_b=sys.executable)
    assert not any(row.difference for row in found.sections["totals"])
    assert not found.notes  # one version of jax


def test_an_interpreter_without_jaxmem(repository):
    no_jaxmem = repository / "python"
    no_jaxmem.write_text("#!/bin/sh\necho no module named jaxmem >&2; exit 1\n")
    no_jaxmem.chmod(0o755)
    with pytest.raises(RuntimeError, match="python_a: .* has ended: no module named"):
        jaxmem.diff("train:step", python_a=str(no_jaxmem))


@pytest.mark.slow
@pytest.mark.skipif(OTHER_PYTHON not in os.environ, reason=f"{OTHER_PYTHON} is not set")
def test_two_versions_of_jax(repository):
    found = jaxmem.diff("train:step", python_a=os.environ[OTHER_PYTHON])
    assert found.notes[0].startswith("before: jax ")
    assert found.sections["totals"][0].before > 0


WRONG = {
    "no second step": (dict(a="train:step"), "b=None: a second step"),
    "no such commit": (dict(a="train:step", commit_a="x"), "commit_a='x': a commit of"),
    "no such Python": (dict(a="train:step", python_b="x"), "python_b='x': a Python"),
    "no such function": (
        dict(a="train:f", b="train:step"),
        "a: 'train' has no function",
    ),
    "no such file": (
        dict(a="x.json", b="train:step"),
        "a='x.json': the path of a report",
    ),
    "of no commit": (
        dict(a=remat(), b=plain(), commit_b="x"),
        "commit_b='x': None where",
    ),
    "no script": (dict(a=remat(), b=plain(), reduce="x.txt"), "reduce='x.txt': a file"),
}


@pytest.mark.parametrize("given, message", WRONG.values(), ids=WRONG)
def test_what_does_not_exist_is_told(repository, given, message):
    with pytest.raises((TypeError, ValueError)) as error:
        jaxmem.diff(**given)
    assert message in str(error.value)


def test_limits(reports):
    small, large = reports
    assert exceeded(large, small, max_growth=10.0, max_bytes="1GiB") == ()
    (sentence,) = exceeded(large, small, max_growth=0.01)
    assert re.fullmatch(r"the peak has grown by [\d.]+ %, more than 1 %", sentence)
    (sentence,) = exceeded(large, max_bytes=large.peak_bytes - 1)
    assert sentence.startswith("the peak takes")
    assert exceeded(large, max_bytes=large.peak_bytes) == ()
    with pytest.raises(ValueError, match="max_ms=3: no seconds are predicted for cpu"):
        exceeded(large, max_ms=3)


def test_more_layers_are_more_of_the_same():
    """Stacked buffers of another length are others; the modules' names stay."""
    found = jaxmem.diff(made(True), made(True, layers=6))
    modules = found.sections["at the peak, by module"]
    assert {row.name: row for row in modules}["mlp"].difference > 0
