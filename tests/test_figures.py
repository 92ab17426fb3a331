"""Figures of the README and the docs come from results, and results from the code."""

import re
import subprocess
import sys

import jax
import pytest

from benchmarks import _rechecks, recheck
from benchmarks.figures import writer
from benchmarks.figures.rows import FIGURES, ROOT, VERSION, rows, with_older

PAGES = writer.pages()
BEGIN, END = "<!-- figures: depth -->", "<!-- end of figures -->"


def test_figures_are_those_of_the_results():
    command = [sys.executable, "-m", "benchmarks.figures", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_renderer_has_its_place():
    found = set().union(*(writer.names(page.read_text()) for page in PAGES))
    assert found == set(FIGURES)


def test_a_figure_that_was_changed_by_hand_is_found_and_mended():
    text = (ROOT / "docs" / "budget.md").read_text()
    body = text[text.index(BEGIN) : text.index(END, text.index(BEGIN))]
    wrong = text.replace(body, re.sub(r"\d,\d{3}", "9,999", body, count=1))
    assert wrong != text
    assert writer.written(wrong) == (text, ["depth"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"<!-- figures: no such -->\n{END}", "no renderer of 'no such'"),
        (f"{BEGIN}\n| a |\n", "no end"),
        (f"Here\n{BEGIN}3{END} are.", "depth: a figure must not begin a line"),
    ],
    ids=["unknown", "open", "begins a line"],
)
def test_a_block_that_cannot_be_written_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        writer.written(text)


def test_tables_of_measured_bytes_are_marked():
    """A row with two numbers of four digits is not a formula."""
    for page in PAGES:
        text = writer.MARKED.sub("", page.read_text())
        lines = [line for line in text.splitlines() if line.startswith("|")]
        typed = [x for x in lines if len(re.findall(r"\d,\d{3}|\d{3}\.\d", x)) > 1]
        assert not typed, page.name


@pytest.mark.parametrize(
    ("old", "shown"),
    [
        ({"MiB": "101", "ms": "2.0"}, "100 / 2.0"),
        ({"MiB": "106", "ms": "2.0"}, "100 / 2.0 (106 / 2.0)"),
        ({"MiB": "100", "ms": "2.2"}, "100 / 2.0 (100 / 2.2)"),
        ({"MiB": "104"}, "100 / 2.0"),
        ({"MiB": "106"}, "100 / 2.0 (106)"),
    ],
    ids=["near", "bytes", "time", "no time", "no time, bytes"],
)
def test_an_older_row_is_shown_where_it_is_far_off_in_what_it_has(old, shown):
    columns = {"MiB": ",.0f", "ms": ".1f"}
    found = with_older({"MiB": "100", "ms": "2.0"}, old, columns)
    assert found.replace("\N{NO-BREAK SPACE}", " ") == shown


# -- results against the code

CHEAP = [(check, row) for check, row in recheck.chosen([], every=False)]
FEWBIT = ("jax.nn.relu", "relu, save=bit", "gelu, save=2")
AT_ONCE = [
    (check, row) for check, row in CHEAP if row.get("activation") in FEWBIT
]  # the quickest to compile
of_this_jax = pytest.mark.skipif(
    f"jax{jax.__version__}" != VERSION, reason=f"the results are of {VERSION}"
)


def name_of(case) -> str:
    return recheck.name_of(*case) if isinstance(case, tuple) else ""


def test_a_tenth_of_the_compiled_rows_is_cheap():
    assert len(CHEAP) >= recheck.compiled_rows() / 10


@of_this_jax
@pytest.mark.usefixtures("standard_jax")
@pytest.mark.parametrize("case", AT_ONCE, ids=name_of)
def test_rows_are_what_the_code_gives(case):
    assert recheck.recheck(*case) == []


@of_this_jax
@pytest.mark.slow
@pytest.mark.usefixtures("standard_jax")
@pytest.mark.parametrize("case", CHEAP, ids=name_of)
def test_a_tenth_of_the_rows_is_what_the_code_gives(case):
    assert recheck.recheck(*case) == []


def test_a_stale_row_is_named_with_its_figures():
    (check,) = (c for c in _rechecks.CHECKS if c.file == "release_unrolled")
    row = next(r for r in rows(check.file, VERSION) if r["target"] == "h100")
    measured = [float(row[column]) for column in check.columns]
    near = [measured[0] + 0.004, measured[1] - 0.004]  # the file has two digits
    assert recheck.differences(check, row, near) == []
    (sentence,) = recheck.differences(check, row, [measured[0], measured[1] + 0.006])
    assert sentence == (
        f"release_unrolled: h100: scheduled: temp MiB is {measured[1] + 0.01:.2f}; "
        f"the file has {row['scheduled: temp MiB']}, of {row['commit']}"
    )
