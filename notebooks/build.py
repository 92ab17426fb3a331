"""Makes the notebooks from their Markdown sources, and runs them.

    python -m notebooks.build               # all of them; outputs are stored
    python -m notebooks.build quickstart    # one
    python -m notebooks.build --no-run      # text alone; unchanged cells keep outputs

A source is `notebooks/NAME.md` (jupytext's Markdown). The first cells of each are the
same and come from this file: how to choose a runtime, and what installs jaxmem.
"""

import pathlib
import re
import sys
import sysconfig
import tempfile
import tomllib

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell

from jaxmem._remedies import PUBLISHED

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parent
MOST_PLAIN = 4000  # characters of a report as text beside its HTML

RUNTIME = """\
This notebook runs on a GPU, on a TPU, and with smaller sizes on a CPU. On Colab choose
one of them under *Runtime > Change runtime type*. The stored outputs were made on a
machine without an accelerator: figures for other chips come from the compilers for
these chips.\
"""

_BY_NAME = """\
# Installs jaxmem where it is missing.
"""
_BY_FILE = """\
# Installs jaxmem where it is missing: from a wheel beside this notebook, or from the
# checkout that it lies in. jaxmem is not on a package index yet. In a checkout,
# `pip wheel --no-deps .` makes the wheel; on Colab, upload it in the panel "Files".
"""
_SOURCE_BY_NAME = """\
    source = "jaxmem"
"""
_SOURCE_BY_FILE = """\
    wheels = sorted(str(path) for path in Path.cwd().glob("jaxmem-*.whl"))
    checkouts = [str(path.parent) for path in Path.cwd().glob("../pyproject.toml")]
    if not wheels + checkouts:
        raise FileNotFoundError(f"put a wheel of jaxmem into {Path.cwd()}")
    source = (wheels[-1:] + checkouts)[0]
"""
INSTALL = """\
{comment}import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec("jaxmem") is None:
{source}    tpu = [*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*")]
    kind = "cuda12" if shutil.which("nvidia-smi") else "tpu" if tpu else ""
    names = [f"{{source}}[plot]", f"jax[{{kind}}]"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *names], check=True)
    if not kind:  # without a device, the compilers of GPUs and TPUs
        command = [sys.executable, "-m", "jaxmem", "targets", "--install"]
        subprocess.run(command, check=True)\
"""


def install_cell() -> str:
    """The cell that installs jaxmem, by its name once that is published."""
    if PUBLISHED:
        return INSTALL.format(comment=_BY_NAME, source=_SOURCE_BY_NAME)
    return INSTALL.format(comment=_BY_FILE, source=_SOURCE_BY_FILE)


def button(name: str) -> str | None:
    """The Colab button of a notebook; None while the repository has no address."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    url = project.get("urls", {}).get("Repository")
    if url is None:
        return None
    repository = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)/?", url)
    if repository is None:
        raise ValueError(f"[project.urls] Repository: {url!r} is no address on GitHub")
    colab = "https://colab.research.google.com"
    place = f"{colab}/github/{repository[1]}/blob/main/notebooks/{name}.ipynb"
    return f"[![Open in Colab]({colab}/assets/colab-badge.svg)]({place})"


def introduction(name: str) -> str:
    """The cell of text that follows the title."""
    return "\n\n".join(filter(None, [button(name), RUNTIME]))


def read(path: pathlib.Path) -> nbformat.NotebookNode:
    """A source, with the common cells as they are now, and ids that do not change."""
    notebook = jupytext.read(path)
    title, *rest = notebook.cells
    first = next(i for i, cell in enumerate(rest) if cell.cell_type == "code")
    common = new_markdown_cell(introduction(path.stem)), new_code_cell(install_cell())
    notebook.cells = [title, *common, *rest[first + 1 :]]
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"{path.stem.replace('_', '-')}-{number}"
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def run(notebook: nbformat.NotebookNode) -> None:
    """Executes the cells in a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=1800, resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            _clean(output)


def _clean(output: nbformat.NotebookNode) -> None:
    """Takes the names of folders of this machine out of what was printed."""
    if "text" in output:
        output.text = _without_folders(output.text)
    data = output.get("data", {})
    if "text/html" in data and len(data.get("text/plain", "")) > MOST_PLAIN:
        del data[
            "text/plain"
        ]  # a dataclass with all its rows; the page has them as HTML
    for kind, data in output.get("data", {}).items():
        if kind.startswith("text/") or kind == "image/svg+xml":
            output.data[kind] = _without_folders(data)


def _without_folders(text: str) -> str:
    # a cell's file is named by a number that differs from run to run
    text = re.sub(r"([\w/.-]*/ipykernel_\d+/|\b)\d{5,}\.py", "notebook.py", text)
    for folder in (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), ROOT):
        text = text.replace(f"{folder}/", "")
    return text


def keep_outputs(notebook: nbformat.NotebookNode, path: pathlib.Path) -> None:
    """Gives cells whose text is that of the stored notebook its outputs."""
    stored = nbformat.read(path, as_version=4) if path.exists() else notebook
    old = {cell.source: cell for cell in stored.cells if cell.cell_type == "code"}
    # what installs prints nothing where nothing is missing, whatever its text is
    first = next(c for c in notebook.cells if c.cell_type == "code")
    old.setdefault(first.source, next(iter(old.values()), first))
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.source in old:
            cell.outputs = old[cell.source].get("outputs", [])
            cell.execution_count = old[cell.source].get("execution_count")


def build(path: pathlib.Path, execute: bool) -> None:
    """Writes the notebook of a source, and the common cells into the source."""
    notebook, target = read(path), path.with_suffix(".ipynb")
    jupytext.write(notebook, path)
    if execute:
        run(notebook)
    else:
        keep_outputs(notebook, target)
    nbformat.write(notebook, target)


def main() -> None:
    names = [word for word in sys.argv[1:] if not word.startswith("-")]
    sources = [FOLDER / f"{name}.md" for name in names] or sorted(FOLDER.glob("*.md"))
    for path in sources:
        print(path.stem, flush=True)
        build(path, "--no-run" not in sys.argv)


if __name__ == "__main__":
    main()
