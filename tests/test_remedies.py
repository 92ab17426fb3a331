"""What is printed to install something works where it is printed."""

import pathlib
import re
import sys
import tomllib
import types

import pytest

import jaxmem
from jaxmem import _remedies
from jaxmem._remedies import install_line, jaxmem_line, missing_package

PACKAGE = pathlib.Path(jaxmem.__file__).parent
ROOT = PACKAGE.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# how a document may install: this checkout with extras, or other packages
INSTALLS = re.compile(r"pip install\s+([^`\n&|]*)")
NAMED = re.compile(r"(?<![\w./{}-])jaxmem(?:\[[\w,]*\])?(?=[\s\"'`);]|$)")
OPTIONS = r"-e|--\S+|-q"


def test_a_script_of_this_environment_is_called_by_its_name(monkeypatch, tmp_path):
    monkeypatch.setattr(_remedies.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(_remedies.shutil, "which", lambda name: f"{tmp_path}/jaxmem")
    assert jaxmem_line("targets") == "jaxmem targets"


def test_another_script_is_not(monkeypatch, tmp_path):
    """That of another environment, or none on the path, as after .venv/bin/jaxmem."""
    for found in (None, "/usr/bin/jaxmem"):
        monkeypatch.setattr(_remedies.shutil, "which", lambda name, f=found: f)
        assert jaxmem_line("targets") == f"{sys.executable} -m jaxmem targets"


def test_packages_are_installed_into_this_environment(monkeypatch):
    line = f"{sys.executable} -m pip install 'matplotlib>=3.9'"
    assert install_line("matplotlib>=3.9") == line
    error = missing_package("drawing", "matplotlib>=3.9")
    assert str(error) == f"drawing needs matplotlib: {line}"
    monkeypatch.setattr(_remedies.importlib.util, "find_spec", lambda name: None)
    assert install_line("a") == f"uv pip install --python {sys.executable} a"


def test_lines_in_a_notebook(monkeypatch):
    shell = types.SimpleNamespace(kernel=None)
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert install_line("a") == "%pip install a"
    assert jaxmem_line("targets").startswith("!")


def test_remedies_name_what_the_extras_have():
    """Their versions stand in the project's file, too."""
    required = {x.partition(" #")[0] for extra in EXTRAS.values() for x in extra}
    used = set()
    for path in PACKAGE.rglob("*.py"):
        used |= set(
            re.findall(r"missing_package\([^)]*\"([\w>=.-]+)\"", path.read_text())
        )
    assert used and used <= required


def test_the_package_prints_no_line_of_its_own():
    """`_remedies.py` makes them all; a docstring may name another package."""
    for path in PACKAGE.rglob("*.py"):
        if path.name == "_remedies.py":
            continue
        for words in INSTALLS.findall(path.read_text()):
            assert "jaxmem" not in words and "[" not in words, path


def _documents():
    patterns = "*.md docs/**/*.md notebooks/*.md notebooks/*.ipynb notebooks/*.py"
    patterns += " .ci/* .github/**/*.yml .pre-commit-config.yaml tests/**/*.py"
    for pattern in patterns.split():
        yield from sorted(ROOT.glob(pattern))


@pytest.mark.skipif(_remedies.PUBLISHED, reason="the package index has jaxmem")
def test_nothing_installs_an_unpublished_package_by_name():
    found = []
    for path in _documents():
        if path.name == "test_remedies.py" or not path.is_file():
            continue
        for words in INSTALLS.findall(path.read_text()):
            if NAMED.search(words):
                found.append((str(path.relative_to(ROOT)), words))
    assert found == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('pip install "jaxmem[targets]"', True),
        ("pip install jaxmem", True),
        ("pip install jaxmem[plot]", True),
        ('pip install ".[plot]" && .venv/bin/jaxmem demo', False),
        ("pip install {source}", False),
    ],
)
def test_such_a_line_is_found(line, found):
    words = "".join(INSTALLS.findall(line))
    assert bool(NAMED.search(words)) == found


def test_ci_installs_and_runs_as_the_readme_says():
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^python3 -m venv .*$", readme, re.MULTILINE)
    first, second = (command.split(" && ") for command in commands)
    install = ".venv/bin/jaxmem targets --install"
    assert first[1:] == [
        '.venv/bin/pip install ".[plot]"',
        install,
        ".venv/bin/jaxmem demo",
    ]
    tests = ".venv/bin/python -m pytest -n 2"
    assert second[1:] == ['.venv/bin/pip install ".[test]"', install, tests]
    environment = (ROOT / ".ci" / "environment").read_text().splitlines()
    assert any("pip install" in line and '".[$1]"' in line for line in environment)
    assert "jaxmem targets --install" in environment
    for name in ("run", "slow"):
        lines = (ROOT / ".ci" / name).read_text().splitlines()
        lines = [line.strip() for line in lines]
        assert any(re.fullmatch(r'\. .*environment"? "test"', one) for one in lines)
        assert "python -m pytest -n 2 -q" in lines
