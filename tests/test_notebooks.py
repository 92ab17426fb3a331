"""The notebooks run in small, hold their outputs, and say what their sources say."""

import re
import subprocess
import sys
import types

import jax
import pytest

jupytext = pytest.importorskip("jupytext")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

from notebooks import build  # noqa: E402

NOTEBOOKS = sorted(build.FOLDER.glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]


def test_a_notebook_for_each_source():
    assert NAMES and NAMES == sorted(p.stem for p in build.FOLDER.glob("*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs(name, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAXMEM_SMALL", "1")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("PYTHONPATH", str(build.ROOT), prepend=":")
    notebook = build.read(build.FOLDER / f"{name}.md")
    build.run(notebook)
    assert _pictures(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_follows_its_source(path):
    """The text of both, and the cells that all of them share."""
    notebook = nbformat.read(path, as_version=4)
    source = jupytext.read(path.with_suffix(".md"))
    made = build.read(path.with_suffix(".md"))
    cells = [[(c.cell_type, c.source) for c in n.cells] for n in (notebook, source)]
    assert cells[0] == cells[1] == [(c.cell_type, c.source) for c in made.cells]
    assert [c["id"] for c in notebook.cells] == [c["id"] for c in made.cells]
    nbformat.validate(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_stored_with_its_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == [*range(1, len(code) + 1)]
    assert _pictures(notebook)
    outputs = [o for c in code for o in c.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    assert not [o for o in outputs if o.get("name") == "stderr"]
    assert not re.findall(r"[ '\"(](/(?:root|home|tmp|work)/[^ '\"]*)", str(outputs))
    assert path.stat().st_size < 500_000


def _pictures(notebook):
    outputs = [o for c in notebook.cells for o in c.get("outputs", ())]
    return [o for o in outputs if "image/png" in o.get("data", {})]


def _install(monkeypatch, folder, missing=True, tool=None) -> list[list[str]]:
    """Runs the cell that installs jaxmem in a folder; the commands that it gives."""
    commands = []
    spec = types.SimpleNamespace(find_spec=lambda name: None if missing else name)
    monkeypatch.setattr("importlib.util", spec)
    monkeypatch.setattr("shutil.which", lambda name: tool)
    run = lambda command, check: commands.append(command)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(folder)
    exec(compile(build.install_cell(), "install", "exec"), {})
    return commands


def test_nothing_is_installed_twice(monkeypatch, tmp_path):
    assert _install(monkeypatch, tmp_path, missing=False) == []


@pytest.mark.parametrize(
    "tool, kind", [(None, "jax[]"), ("x", "jax[cuda12]")], ids=["no device", "GPU"]
)
def test_installs_from_a_wheel_beside_it(monkeypatch, tmp_path, tool, kind):
    for version in ("0.1.0", "0.2.0"):
        (tmp_path / f"jaxmem-{version}-py3-none-any.whl").touch()
    command, *more = _install(monkeypatch, tmp_path, tool=tool)
    wheel = tmp_path / "jaxmem-0.2.0-py3-none-any.whl"
    assert command[:5] == [sys.executable, "-m", "pip", "install", "-q"]
    assert command[5:] == [f"{wheel}[plot]", kind]
    # the wheels of a device compile for it; without one there are compilers to fetch
    compilers = [sys.executable, "-m", "jaxmem", "targets", "--install"]
    assert more == ([] if tool else [compilers])


def test_installs_from_the_checkout_that_it_lies_in(monkeypatch):
    command, _ = _install(monkeypatch, build.FOLDER)
    assert command[5] == f"{build.FOLDER}/..[plot]"


def test_without_a_source_it_says_what_to_do(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match="put a wheel of jaxmem into"):
        _install(monkeypatch, tmp_path)


def test_the_name_alone_once_published(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "PUBLISHED", True)
    command, _ = _install(monkeypatch, tmp_path)
    assert command[5] == "jaxmem[plot]"


def _project(folder, text):
    (folder / "pyproject.toml").write_text(f"[project]\n{text}")
    return folder


def test_button(monkeypatch, tmp_path):
    """There is one as soon as the project says where its repository is."""
    monkeypatch.setattr(build, "ROOT", _project(tmp_path, ""))
    assert build.button("adama") is None
    assert build.introduction("adama") == build.RUNTIME
    urls = '[project.urls]\nRepository = "https://github.com/some/where"'
    _project(tmp_path, urls)
    place = "/github/some/where/blob/main/notebooks/adama.ipynb)"
    assert build.introduction("adama").splitlines()[0].endswith(place)
    _project(tmp_path, urls.replace("github.com", "example.com"))
    with pytest.raises(ValueError, match="no address on GitHub"):
        build.button("adama")


def test_pages_list_all_notebooks():
    page = (build.ROOT / "docs" / "notebooks.md").read_text()
    listed = re.findall(r"^notebooks/(\w+)$", page, re.MULTILINE)
    assert sorted(listed) == NAMES
    assert set(re.findall(r"\{doc\}`notebooks/(\w+)`", page)) == set(NAMES)


OTHER_MODELS = {
    "nnx": """
class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(768, 64, rngs=rngs)
        self.down = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x))).mean(1)

model = Net(nnx.Rngs(0))
""",
    "functions": """
def init(key):
    return {"up": jax.random.normal(key, (768, 64)), "down": jnp.zeros((64, 10))}

def apply(params, x):
    return (jax.nn.gelu(x @ params["up"]) @ params["down"]).mean(1)

model = init, apply
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHER_MODELS)
def test_your_model_takes_other_models(kind, monkeypatch):
    """What precedes the search for a budget, with another model in its cell."""
    monkeypatch.setenv("JAXMEM_SMALL", "1")
    notebook = build.read(build.FOLDER / "your_model.md")
    cells = [c.source for c in notebook.cells if c.cell_type == "code"]
    (end,) = (i for i, cell in enumerate(cells) if "budget =" in cell)
    (place,) = (i for i, cell in enumerate(cells) if "model = ViT()" in cell)
    shapes = cells[place].partition("model = ViT()")[2].replace("bfloat16", "float32")
    cells[place] = f"PATCHES = 16\n{OTHER_MODELS[kind]}\n{shapes}"
    space = {}
    # as a notebook has them; the tests are stricter
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for number, cell in enumerate(cells[:end]):
            exec(compile(cell, f"cell {number}", "exec"), space)
    assert space["lean"].peak_bytes <= space["plain"].peak_bytes
    assert space["plan"].scheduled.peak_bytes > 0
    assert space["count"] == 768 * 64 + 64 * 10 + (74 if kind == "nnx" else 0)
