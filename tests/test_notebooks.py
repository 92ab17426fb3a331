"""The notebooks run on CPU, in small, and say what their text sources say."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_is_a_notebook():
    assert NOTEBOOKS


# train, or compile for an H100
SLOW = ("adama", "budget", "few_bit", "fine_tuning", "kernels")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=pytest.mark.slow if p.stem in SLOW else (), id=p.stem)
        for p in NOTEBOOKS
    ],
)
def test_notebook_runs(path, monkeypatch, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent), prepend=":")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    pictures = [o for c in notebook.cells for o in c.get("outputs", ()) if _picture(o)]
    assert pictures


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_follows_its_source_and_holds_no_output(path):
    jupytext = pytest.importorskip("jupytext")
    notebook = jupytext.read(path)
    source = jupytext.read(path.with_suffix(".md"))
    cells = [[(c.cell_type, c.source) for c in n.cells] for n in (notebook, source)]
    assert cells[0] == cells[1]
    assert not any(c.get("outputs") for c in notebook.cells)


def _picture(output):
    return "image/png" in output.get("data", {})
