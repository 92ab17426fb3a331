"""The way in: README.md's script, the scripts that the pages include, and links."""

import ast
import builtins
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from benchmarks import reports

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
# recipes -> what they need of the extra `foreign`
NEEDS = {"grain_loader": "grain", "keras_jax": "keras", "neural_ode": "diffrax"}
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
# Pages whose blocks are one script, in their order.
SCRIPTS = [
    ROOT / "README.md",
    *(DOCS / f"{name}.md" for name in ("measuring", "frameworks", "substitution")),
    *(DOCS / f"{name}.md" for name in ("reading_a_report", "troubleshooting")),
]
SECTIONS = ("installation", "which_tool", "coming_from", "comparison", "lint", "index")
ENTRY = [*SCRIPTS, *(DOCS / f"{name}.md" for name in SECTIONS)]
ENTRY += sorted((DOCS / "getting_started").glob("*.md"))
FRAMEWORKS = ("nnx", "linen", "jax", "equinox")


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: pathlib.Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.M)


# -- scripts


def test_the_readme_shows_the_script():
    assert (
        blocks(ROOT / "README.md")[0] == (ROOT / "examples/quickstart.py").read_text()
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path, tmp_path):
    """As a reader runs it: `python PATH`, in another folder, without a GPU."""
    if importlib.util.find_spec(NEEDS.get(path.stem, "jax")) is None:
        pytest.skip(f"needs {NEEDS[path.stem]}: pip install '.[foreign]'")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    if path.stem.startswith("getting_started"):
        saved = re.search(r"temporaries: ([\d,]+) bytes -> ([\d,]+) bytes", run.stdout)
        before, after = (int(size.replace(",", "")) for size in saved.groups())
        assert after < before / 2
        assert re.search(r"released: [\d.]+ [KM]iB of gradients", run.stdout)
        assert "losses, scheduled:" in run.stdout
    if path.stem == "quickstart":
        assert re.search(r"peak [\d.]+ MiB.*fits", run.stdout)
        assert re.search(r"loss: [\d.]+", run.stdout)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_page_includes_its_whole_script(framework):
    page = (DOCS / "getting_started" / f"{framework}.md").read_text()
    script = f"../../examples/getting_started_{framework}.py"
    assert f"```{{literalinclude}} {script}\n:language: python\n```" in page


def test_every_recipe_is_on_its_page_whole():
    page = (DOCS / "recipes.md").read_text()
    tests = "".join(p.read_text() for p in (ROOT / "tests/recipes").glob("test_*.py"))
    for path in (ROOT / "examples" / "recipes").glob("*.py"):
        include = f"```{{literalinclude}} ../{name_of(path)}\n:language: python\n```"
        assert include in page
        assert re.search(rf"\bimport\b.*\b{path.stem}\b|recipes\.{path.stem}\b", tests)


def test_what_is_included_exists():
    for page in PAGES:
        for file in re.findall(r"^```{literalinclude} (.*)$", page.read_text(), re.M):
            assert (page.parent / file).resolve().exists(), name_of(page)


@pytest.mark.slow
@pytest.mark.parametrize("page", SCRIPTS[1:], ids=name_of)
def test_the_blocks_of_a_page_run(page, monkeypatch, tmp_path):
    """One after another, in one namespace, with JAX's own promotion of dtypes."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": f"docs_{page.stem}"}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for number, block in enumerate(blocks(page)):
            exec(compile(block, f"{page.name}, block {number + 1}", "exec"), names)


# -- names


def undefined(code: str) -> set[str]:
    """Names that are read and neither bound in the code nor Python's own."""
    read, bound = set(), set(dir(builtins))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
    return read - bound


@pytest.mark.parametrize("page", ENTRY, ids=name_of)
def test_no_block_of_code_uses_an_undefined_name(page):
    assert undefined("\n".join(blocks(page))) == set()


def test_an_undefined_name_is_found():
    assert undefined("import a.b\ndef f(x): return a, x, y, len") == {"y"}


# -- links


CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.M)


def links(page: pathlib.Path) -> list[str]:
    text = CODE.sub("", page.read_text())
    return [to for to in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in to]


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors of headings, as GitHub and MyST make them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(CODE_BLOCK, "", page.read_text()), re.M)
    kept = (re.sub(r"[^\w\- ]", "", head.lower()) for head in heads)
    return {head.strip().replace(" ", "-") for head in kept}


CODE_BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.M)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page):
    for link in links(page):
        file, _, anchor = link.partition("#")
        to = (page.parent / file).resolve() if file else page
        assert to.exists(), link
        assert not anchor or anchor in anchors(to), link


def test_links_are_found():
    assert "docs/installation.md" in links(ROOT / "README.md")
    assert "#activations" in links(DOCS / "which_tool.md")
    assert "jaxcheckpoint" in anchors(DOCS / "coming_from.md")


# -- what a first screen says


FRONT = ROOT / "README.md", DOCS / "index.md"


def first_screen(page: pathlib.Path) -> str:
    return page.read_text().split("\n## ")[0]


@pytest.mark.parametrize("page", FRONT, ids=name_of)
def test_the_first_screen_has_install_code_table_and_picture(page):
    """In this order: a line to install, a script, a table of figures, a picture."""
    text = first_screen(page)
    script = "```python" if page == FRONT[0] else "```{literalinclude}"
    parts = "pip install", script, "<!-- figures: first screen -->", "before_after.svg"
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert len(re.findall(r"^```sh\n.*\n```$", text, re.M)) == 1  # a line to install
    assert len(re.findall(r"^\|---", text, re.M)) == 1 and len(text.splitlines()) <= 60


@pytest.mark.parametrize("page", FRONT, ids=name_of)
def test_the_front_pages_answer_what_a_reader_asks_first(page):
    start = page.read_text().split("\n## Quick start\n")[1].split("\n## ")[0]
    asked = re.findall(r"^\*\*([^*]+\?)\*\*", start, re.M)
    measured = "How were the numbers measured?"
    assert asked == ["Does my model fit?", "What does it cost?", measured]
    assert "Which API do I need?" in page.read_text()


def test_the_script_is_ten_lines_besides_its_imports():
    code = (ROOT / "examples/quickstart.py").read_text().splitlines()
    lines = [x for x in code if x and not x.startswith(("import ", "from "))]
    assert len(lines) <= 12


def test_the_readme_says_how_to_run_the_demo_and_the_tests():
    start = (ROOT / "README.md").read_text().split("\n## Which API")[0]
    assert "jaxmem demo" in start and "pytest" in start


def test_no_column_is_called_ours():
    heads = [x for page in PAGES for x in page.read_text().splitlines() if "|" in x]
    assert not [line for line in heads if re.search(r"\bours\b", line)]


# -- the reports that the pages show


NAMES = (*reports.CASES, *reports.EXAMPLES)


def test_every_report_is_shown_and_names_its_command():
    text = "".join(page.read_text() for page in PAGES)
    for name in NAMES:
        assert f"results/reports/{name}.txt" in text
        lines = (reports.FOLDER / f"{name}.txt").read_text().splitlines()
        command, versions = lines[:2]
        assert re.match(r"# python -m benchmarks.reports, commit [0-9a-f]{7}", command)
        assert versions.startswith("# jax ")
    assert {path.stem for path in reports.FOLDER.glob("*.txt")} == set(NAMES)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version__ != "0.10.2", reason="the reports are of jax 0.10.2")
def test_a_report_is_what_the_code_prints():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        written = (reports.FOLDER / "head.txt").read_text().splitlines()[2:]
        assert reports.text("head").splitlines() == written
