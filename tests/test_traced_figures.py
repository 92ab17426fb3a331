"""Every figure of README.md and docs/ is traced to a results file, or is a definition.

A number with a unit of bytes, a percentage or a ratio stands between the markers that
`benchmarks.figures` fills from benchmarks/results, or it is listed below with a reason.
"""

import re
import subprocess

import pytest

from benchmarks.figures import writer
from benchmarks.figures.results import CHIPS, results
from benchmarks.figures.rows import FIGURES, RESULTS, ROOT, rows
from jaxmem.chips import CHIPS as KNOWN_CHIPS

PAGES = writer.pages()
UNITS = r"[KMGT]i?B\b|bytes?\b|%|per ?cent\b|times\b|-fold\b"
NUMBER = re.compile(
    rf"(?<![\w.,/^-])(\d[\d,]*(?:\.\d+)?(?:/\d+)?)(?:\s?({UNITS})|(x)\b)"
)
# Code, what the results files gave, links and comments.
ELSEWHERE = (
    writer.MARKED,
    re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE),
    re.compile(r"`[^`]*`"),
    re.compile(r"\]\([^)]*\)|<!--.*?-->", re.DOTALL),
)

SIZE = "the size of the problem that is measured, an argument of the benchmark"
SET = "a threshold that the code sets"
DOWNLOAD = "the size of the compilers' wheels in the package index"
EXAMPLE = "an example of how to write an argument"
FORMULA = "what the formula beside it gives"
ALLOWED = {
    "README.md": {"1.5 GB": DOWNLOAD, "5 %": SET},
    "docs/benchmarks/activations.md": {"1 GiB": SIZE, "2 GiB": SIZE},
    "docs/benchmarks/models.md": {"16 GiB": SIZE},
    "docs/benchmarks/planning.md": {"16 GB": SIZE},
    "docs/benchmarks/scheduling.md": {"16 GiB": SIZE},
    "docs/check.md": {
        "10.1 times": SET,
        "8 times": SET,
        "186 times": EXAMPLE,
        "450 times": EXAMPLE,
        "256 times": FORMULA,
    },
    "docs/command_line.md": {
        "1.5 GB": DOWNLOAD,
        "1 MiB": EXAMPLE,
        "2 GiB": EXAMPLE,
        "14 GiB": EXAMPLE,
        "2 %": EXAMPLE,
    },
    "docs/diff.md": {"1 %": SET},
    "docs/cross_entropy.md": {"4 GiB": FORMULA, "32 MiB": SET},
    "docs/frontier.md": {"80 GiB": SIZE},
    "docs/installation.md": {"1.5 GB": DOWNLOAD},
    "docs/kernels.md": {"16 GiB": SIZE, "64 MiB": SET},
    "docs/memory_layers.md": {"2 GiB": SIZE},
    "docs/storage.md": {"1.03 bytes": FORMULA},
    "docs/tables.md": {"1 MiB": SET, "1 GiB": SIZE},
    "docs/time.md": {
        "32 bytes": "what the chip's memory sends at once",
        "25 %": "the goal that published steps are counted by",
    },
}
MEMORY = {
    f"{chip.memory_bytes / 2**30:g} GiB": f"the memory of {name}, by the table of chips"
    for name, chip in KNOWN_CHIPS.items()
    if chip.memory_bytes
}
WIDEST = 16  # bytes of a number of any dtype


def typed(text: str) -> set[str]:
    """The figures that somebody typed, widths of numbers aside."""
    for pattern in ELSEWHERE:
        text = pattern.sub(" ", text)
    found = set()
    for number, unit, ratio in NUMBER.findall(text):
        if not (unit.startswith("byte") and is_width(number)):
            found.add(f"{number}x" if ratio else f"{number} {unit}")
    return found


def is_width(number: str) -> bool:
    """Bytes of one number, as "8 bytes a row" or "1/8 byte an element" state."""
    over, _, under = number.partition("/")
    return over.isdigit() and int(over) <= WIDEST and (not under or int(under) <= 8)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_figure_is_typed(page):
    allowed = ALLOWED.get(str(page.relative_to(ROOT)), {})
    assert typed(page.read_text()) - set(MEMORY) <= set(allowed)


def test_what_is_allowed_is_there():
    found = {str(page.relative_to(ROOT)): typed(page.read_text()) for page in PAGES}
    for page, figures_of in ALLOWED.items():
        assert set(figures_of) <= found[page], page


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 2,385 MiB.", {"2,385 MiB"}),
        ("a step of\n1.03\nbytes", {"1.03 bytes"}),
        ("12 % less, 3.5x faster, 7 times", {"12 %", "3.5x", "7 times"}),
        ("<!-- figures: depth -->2,385 MiB<!-- end of figures -->", set()),
        ("`budget='14 GiB'` and 8 bytes a row, 1/8 byte an element", set()),
        ("8 x 512 tokens, 64 images of 224 x 224, arXiv 2305.19982", set()),
        ("```python\nx = '14 GiB'\n```", set()),
    ],
    ids=["bytes", "two lines", "ratios", "marked", "widths", "shapes", "code"],
)
def test_a_typed_figure_is_found(text, found):
    assert typed(text) == found


# -- what the markers are filled from


def test_every_renderer_reads_a_results_file(monkeypatch):
    read = []
    text_of = type(RESULTS).read_text
    monkeypatch.setattr(
        type(RESULTS), "read_text", lambda path: read.append(path) or text_of(path)
    )
    for name, render in FIGURES.items():
        rows.cache_clear()
        results.cache_clear()
        read.clear()
        # these hold the rows already, or are the library's own table
        if not name.startswith(("results, ", "known faults")):
            assert render()
            assert read, name
            assert all(path.parent == RESULTS for path in read), name


def test_every_row_names_its_commit():
    for of in results():
        assert of.command.startswith("python -m benchmarks."), of.path
        assert re.match(r"jax \d+\.\d+", of.versions), of.path
        assert of.columns[-1] == "commit", of.path
        assert all(re.fullmatch(r"[0-9a-f]{7}\+?", c) for c in of.commits), of.path
        assert of.chips, of.path  # raises where the table of chips lacks the file


def test_the_commits_are_in_the_history():
    git = ["git", "-C", str(ROOT)]
    shallow = [*git, "rev-parse", "--is-shallow-repository"]
    done = subprocess.run(shallow, capture_output=True, text=True)
    if done.stdout.strip() != "false":
        pytest.skip("the history is not here")
    commits = {c.rstrip("+") for of in results() for c in of.commits}
    listed = subprocess.run(
        [*git, "cat-file", "--batch-check"],
        input="\n".join(sorted(commits)),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = listed.stdout.splitlines()
    assert [line for line in lines if " commit " not in line] == []


def test_no_chip_is_named_twice():
    """A file with a column of chips needs no entry in the table, and others do."""
    for of in results():
        named = {"target", "chip", *KNOWN_CHIPS} & set(of.columns)
        assert (of.name in CHIPS) != bool(named), of.name
