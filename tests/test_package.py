"""The built wheel works in an environment and a folder without the sources.

Builds in isolation, which takes `build` and `hatchling` from the package index.
"""

import os
import pathlib
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile

import pytest

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"jaxmem-{PROJECT['version']}"


def _run(*command, **how) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **how)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A fresh environment that sees what is installed here, but not jaxmem."""
    folder = tmp_path_factory.mktemp("package") / "venv"
    venv.create(folder, with_pip=True, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # Unlike its own folder, one that a .pth file names has no effect by .pth files of
    # its own, so that an editable jaxmem is not found.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def built(environment, tmp_path_factory):
    """The folder with the sdist, and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    _run(environment, "-m", "pip", "install", "--quiet", "build")
    _run(environment, "-m", "build", "--outdir", out, ROOT)
    return out


def _wheel(folder: pathlib.Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(folder / f"{NAME}-py3-none-any.whl")


def test_the_wheel_holds_both_packages_and_nothing_else(built):
    names = set(_wheel(built).namelist())
    sources = {
        str(path.relative_to(ROOT))
        for package in ("jaxmem", "pallas_kernels")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {n for n in names if ".dist-info/" not in n} == sources
    assert {"jaxmem/py.typed", f"{NAME}.dist-info/licenses/LICENSE"} <= names


def test_metadata_names_licence_and_extras(built):
    text = _wheel(built).read(f"{NAME}.dist-info/METADATA").decode()
    assert f"License-Expression: {PROJECT['license']}" in text
    assert f"Version: {PROJECT['version']}" in text
    for extra in PROJECT["optional-dependencies"]:
        assert f"Provides-Extra: {extra}" in text
    assert text.endswith((ROOT / "README.md").read_text())


def test_the_sdist_builds_the_wheel_of_the_tree(built, environment, tmp_path):
    """`build` made the wheel of the sdist; the tree makes the same, byte for byte."""
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        names = set(archive.getnames())
    wanted = ("tests/test_package.py", "docs/conf.py", "CHANGELOG.md", ".ci/smoke.py")
    assert {f"{NAME}/{name}" for name in wanted} <= names
    _run(environment, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT)
    wheels = (_wheel(built), _wheel(tmp_path))
    contents = [{n: w.read(n) for n in w.namelist()} for w in wheels]
    assert contents[0] == contents[1]


def test_the_installed_wheel_works(built, environment, tmp_path):
    wheel = built / f"{NAME}-py3-none-any.whl"
    # Another jaxmem may be installed beside the dependencies: pip must not stop there.
    options = ("--quiet", "--no-deps", "--ignore-installed")
    _run(environment, "-m", "pip", "install", *options, wheel)
    without = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environ = {**without, "JAXMEM_CACHE_DIR": str(tmp_path / "cache")}
    printed = _run(environment, ROOT / ".ci" / "smoke.py", cwd=tmp_path, env=environ)
    assert f"jaxmem {PROJECT['version']} works on Python" in printed
    assert sys.version.split()[0] in printed
