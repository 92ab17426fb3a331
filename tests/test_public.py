"""What `import jaxmem` offers: light, complete, and what the documentation names."""

import ast
import dataclasses
import importlib
import json
import pathlib
import re
import subprocess
import sys
import types

import pytest

import jaxmem
from docs import exported

PACKAGE = pathlib.Path(jaxmem.__file__).parent
ROOT = PACKAGE.parent
LIGHT = "import sys; before = set(sys.modules); import jaxmem; "


def _new_modules(code: str) -> set[str]:
    """What a fresh interpreter loads, by the first part of the name."""
    code = (
        f"{LIGHT}{code}; import json; print(json.dumps([*{{*sys.modules}} - before]))"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in json.loads(run.stdout)}


def test_import_loads_nothing_else():
    """Of what is installed jaxmem alone, and nothing of jax, numpy or flax."""
    loaded = _new_modules("dir(jaxmem)")
    assert loaded - set(sys.stdlib_module_names) <= {"jaxmem"}
    assert len(loaded) < 30  # beside the interpreter's own; importlib.metadata is 50


def test_planning_loads_no_jax():
    assert not _new_modules("jaxmem.planning") & {"jax", "jaxlib", "flax"}


# Users have no need of these.
INNER = {"chips", "cli", "cost", "faults", "frameworks", "ir", "pages"}


def test_subpackages_are_all_there():
    found = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert found == {*jaxmem._SUBPACKAGES, *INNER, "_checks", "_compat"}


def _listed_after(words: str, text: str) -> set[str]:
    """The names in backticks that follow in the same clause."""
    clause = re.match(r"(?:[\s,]|and\b|`\w+`)+", text.partition(words)[2])
    assert clause is not None, words
    return set(re.findall(r"`(\w+)`", clause[0]))


def test_the_policy_names_every_subpackage():
    policy = (ROOT / "docs" / "policy.md").read_text()
    public = _listed_after("`jaxmem` and of its subpackages", policy)
    assert public == set(jaxmem._SUBPACKAGES)
    assert _listed_after("`__all__`, the subpackages", policy) == INNER


def test_the_documentation_is_asked_for_every_subpackage():
    assert {f"jaxmem.{part}" for part in jaxmem._SUBPACKAGES} <= {*exported.PACKAGES}


@pytest.mark.parametrize("name", jaxmem.__all__)
def test_every_name_is_there_by_itself(name):
    assert jaxmem.__getattr__(name) is not None


def test_lists_of_names_agree():
    assert len(set(jaxmem.__all__)) == len(jaxmem.__all__)
    assert {n for n in dir(jaxmem) if not n.startswith("__")} == set(jaxmem.__all__)
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in typed.body if isinstance(node, ast.ImportFrom)]
    homes = {a.asname: node.module for node in imports for a in node.names}
    parts = dict.fromkeys(jaxmem._SUBPACKAGES, "jaxmem")
    assert homes == {**jaxmem._HOME, **parts}


def test_no_other_name():
    with pytest.raises(AttributeError, match="'jaxmem' has no attribute 'banana'"):
        jaxmem.banana  # noqa: B018


def _public(part: str) -> list[str]:
    return importlib.import_module(f"jaxmem.{part}").__all__


@pytest.mark.parametrize("part", jaxmem._SUBPACKAGES)
def test_a_package_lists_what_users_call(part):
    module = importlib.import_module(f"jaxmem.{part}")
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_there_are_about_fifty_public_names():
    """Beside the ops and the optimizers; tables, searches, rows of plans are none."""
    names = {name for part in jaxmem._SUBPACKAGES for name in _public(part)}
    assert len(names - {*_public("ops"), *_public("optim")}) <= 53
    assert set(jaxmem._HOME) <= names


def test_public_names_have_a_docstring():
    """The documentation's build asks the same."""
    assert exported.undocumented() == []


def test_a_public_name_without_a_docstring_is_found(monkeypatch):
    @dataclasses.dataclass  # whose docstring would be its signature
    class Bare:
        size: int

        def method(self): ...

        def told(self):
            """This one is documented."""

    monkeypatch.setattr(exported, "exported", lambda: [("jaxmem.Bare", Bare)])
    assert exported.undocumented() == ["jaxmem.Bare", "jaxmem.Bare.method"]


def test_public_names_have_an_entry_in_the_api():
    assert exported.undescribed() == []


def test_what_goes_by_the_name_of_a_function_has_an_entry_too():
    """As `galore.paper`."""
    found = {
        f"{name}.{part}"
        for name, value in exported.exported()
        for part in (vars(value) if isinstance(value, types.FunctionType) else ())
        if not part.startswith("_")
    }
    assert "jaxmem.optim.galore.paper" in found
    assert found <= set(exported.entries())
    assert all(exported.find(name).__doc__ for name in found)


def test_an_entry_of_the_api_stands_once_under_the_name_that_is_typed():
    entries = exported.entries()
    assert len(set(entries)) == len(entries)
    for name in entries:
        assert not re.search(r"\._", name)
        short = f"jaxmem.{name.rpartition('.')[2]}"
        assert name == short or short not in map("jaxmem.{}".format, jaxmem._HOME)


def test_version():
    assert re.match(r"\d+\.\d+", jaxmem.__version__)


def _documents():
    for pattern in ("README.md", "CHANGELOG.md", "docs/**/*.md", "notebooks/*.md"):
        for path in sorted(ROOT.glob(pattern)):
            yield str(path.relative_to(ROOT)), _named_in_prose(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py")):
        names = re.findall(r"`(jaxmem(?:\.\w+)+)", path.read_text())
        if names:
            yield str(path.relative_to(ROOT)), set(names)


def _named_in_prose(text: str) -> set[str]:
    names = set(re.findall(r"(?<![\w/.-])jaxmem(?:\.[A-Za-z_]\w*)+", text))
    for module, what in re.findall(r"from (jaxmem[\w.]*) import ([\w, ]+)", text):
        names |= {f"{module}.{name.strip()}" for name in what.split(",")}
    return names


DOCUMENTS = dict(_documents())


def _find(name: str):
    """By attributes, as after `import jaxmem` and no other import in the process."""
    _, first, *rest = name.split(".")
    value = jaxmem.__getattr__(first)
    for part in rest:
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("path", DOCUMENTS)
def test_names_in_the_documentation_exist(path):
    missing = []
    for name in sorted(DOCUMENTS[path]):
        try:
            _find(name)
        except AttributeError:
            missing.append(name)
    assert not missing


def test_the_documentation_names_what_is_public():
    """A package's own list, or what the API's pages describe besides: results."""
    results = set(exported.entries())
    documents = (DOCUMENTS[path] for path in DOCUMENTS if path.endswith(".md"))
    names = {".".join(name.split(".")[:3]) for name in set().union(*documents)}
    for name in sorted(names - results):
        _, part, *attributes = name.split(".")
        if attributes and part in jaxmem._SUBPACKAGES:
            module = isinstance(_find(name), types.ModuleType)
            assert module or attributes[0] in _public(part), name


def test_the_documentation_names_something():
    """Guards the pattern above: these are in the README."""
    assert {"jaxmem.planning", "jaxmem.ops", "jaxmem.schedule"} <= DOCUMENTS[
        "README.md"
    ]
