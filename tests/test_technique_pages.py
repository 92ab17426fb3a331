"""Each technique has a page in one form, whose examples run as they are copied."""

import re

import pytest

from tests.docs_code import DOCS, blocks, run

SECTIONS = ["Idea", "How to use it", "Bytes", "Error", "When not to use it", "Source"]
TECHNIQUES = (
    "blocks",
    "budget",
    "cross_entropy",
    "few_bit",
    "foreign",
    "frozen",
    "kernels",
    "memory_layers",
    "norms",
    "ops",
    "reversible",
    "sampled_linear",
    "storage",
    "tables",
    "tiles",
    "optimizers/gradient_release",
    "optimizers/adama",
    "optimizers/low_bit",
    "optimizers/low_rank",
    "optimizers/factored",
    "optimizers/lion",
    "optimizers/schedule_free",
    "optimizers/muon",
    "optimizers/preconditioned",
    "optimizers/host",
)
PAGES = [*TECHNIQUES, "optimizer"]
QUICK = {"ops", "optimizer"}
# Phrases that puzzled readers: a page says what, how many bytes, where, what to type.
RIDDLES = (
    r"[Ss]ay the bytes|who holds|held to the compiler|\bours\b|\btwins?\b|last word"
)


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text()


@pytest.mark.parametrize("page", TECHNIQUES)
def test_a_page_has_the_sections_in_their_order(page):
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.M)
    assert re.findall(r"^## (.*)$", prose, re.M) == SECTIONS


@pytest.mark.parametrize("page", TECHNIQUES)
def test_a_page_shows_bytes_that_were_measured(page):
    (part,) = re.findall(r"^## Bytes\n(.*?)^## ", text_of(page), re.DOTALL | re.M)
    assert "<!-- figures: " in part


def test_every_page_of_the_optimizers_is_a_technique():
    found = {f"optimizers/{p.stem}" for p in (DOCS / "optimizers").glob("*.md")}
    assert found == {page for page in TECHNIQUES if "/" in page}


def test_there_are_no_riddles():
    pages = [*TECHNIQUES, "optimizer", "saves", "architecture"]
    found = {page: re.findall(RIDDLES, text_of(page)) for page in pages}
    assert not any(found.values()), found


@pytest.mark.parametrize(
    "page",
    [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in PAGES],
)
def test_the_examples_of_a_page_run(page, capsys):
    """One after another, in one namespace, as in a notebook."""
    names = {"__name__": f"docs_{page.replace('/', '_')}"}
    code = blocks(DOCS / f"{page}.md")
    assert code
    for number, block in enumerate(code):
        run(block, names, f"{page}.md, block {number + 1}")
