"""Compilers in a folder that only jaxmem's own processes have on their path."""

import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import threading
import venv
import zipfile

import jax
import jaxlib
import pytest

import jaxmem
from jaxmem import chips
from jaxmem.chips import InstallError, _compilers, _folder, _install, install_compilers
from jaxmem.memory.compile import cache, pool

ROOT = str(pathlib.Path(jaxmem.__file__).parents[1])
CUDA = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXMEM_TARGETS_DIR", str(tmp_path / "targets"))
    monkeypatch.setattr(_compilers, "version_of", lambda package: None)
    _compilers.forget_compilers()
    yield
    _compilers.forget_compilers()


def libtpu_version():
    return _compilers._libtpu_of_jax().removeprefix("==").replace("*", "7")


def distribution(folder, name, version):
    """What an installer leaves of a package."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (folder / "nvidia").mkdir(exist_ok=True)


@pytest.fixture
def installer(monkeypatch):
    """In the place of pip: writes what was asked for, and remembers it."""
    asked = []

    def run(kind, folder, wanted, tell):
        asked.append((kind, wanted))
        for requirement in wanted:
            name, _, version = requirement.partition("==")
            distribution(folder, name, version.replace("*", "7") or "13.5")

    monkeypatch.setattr(_install, "_run_installer", run)
    return asked


def test_what_belongs_to_this_jax_is_installed_once(installer):
    said = []
    gpu, tpu = install_compilers("all", said.append)
    own = f"=={jaxlib.__version__}"
    wanted = (f"{CUDA[0]}{own}", f"{CUDA[1]}{own}", CUDA[2])
    libtpu = _compilers._libtpu_of_jax()
    assert installer == [("gpu", wanted), ("tpu", (f"libtpu{libtpu}",))]
    assert gpu.used and set(gpu.packages) == set(CUDA) and gpu.bytes > 0
    assert chips.compiler_folders() == (str(gpu.path), str(tpu.path))
    assert all(row.available and not row.remark for row in chips.targets())
    assert chips.get_target("h100").compiler.endswith("of jaxmem's folder")
    assert dict(chips.compiler_versions())["libtpu"] == libtpu_version()
    assert any("about 725 MiB" in line for line in said)  # told before
    assert any(line.startswith("gpu: installed, ") for line in said)
    assert install_compilers("all") == () and len(installer) == 2


def test_a_library_of_the_environment_does_not_hide_the_folder(installer):
    """Wheels for CUDA 12 have made a package of `nvidia`."""
    (gpu,) = install_compilers("gpu")
    assert "extend_path" in (gpu.path / "nvidia" / "__init__.py").read_text()


def test_versions_that_do_not_match_are_installed_beside(installer, monkeypatch):
    monkeypatch.setattr(_compilers, "version_of", {"libtpu": "0.0.1"}.get)
    _compilers.forget_compilers()
    (tpu,) = install_compilers("tpu")
    row = chips.get_target("tpu-v5e")
    assert libtpu_version() in row.compiler and not row.remark
    assert chips.compiler_folders() == (str(tpu.path),)


def test_cached_reports_depend_on_the_installed_compilers(installer):
    before = cache.key_of("x")
    install_compilers("tpu")
    assert cache.key_of("x") != before


def test_two_that_install_at_once_wait_for_each_other(installer, monkeypatch):
    inside, go, said = threading.Event(), threading.Event(), []
    run = _install._run_installer

    def slow(*args):
        inside.set()
        assert go.wait(10)
        run(*args)

    monkeypatch.setattr(_install, "_run_installer", slow)
    first = threading.Thread(target=install_compilers, args=("tpu",))
    first.start()
    assert inside.wait(10)

    def tell(text):
        said.append(text)
        go.set()  # only once the second one waits

    (folder,) = install_compilers("tpu", tell)
    first.join()
    assert len(installer) == 1 and folder.used
    assert "waiting" in said[0] and "another process has installed" in said[1]


def test_an_installation_that_fails_leaves_nothing(monkeypatch):
    def fail(kind, folder, wanted, tell):
        (folder / "half").write_text("x")
        raise InstallError("no connection")

    monkeypatch.setattr(_install, "_run_installer", fail)
    with pytest.raises(InstallError, match="no connection"):
        install_compilers("tpu")
    left = {path.name for path in _folder.own_dir("tpu").parent.iterdir()}
    assert left == {"tpu.lock"}
    assert not chips.get_target("tpu-v5e", check=False).available


def test_what_a_killed_process_has_left_is_removed(installer):
    left = _folder.own_dir("tpu").with_name(".tpu-left")
    left.mkdir(parents=True)
    install_compilers("tpu")
    assert not left.exists()


def test_a_folder_that_cannot_be_written_is_said(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXMEM_TARGETS_DIR", str(tmp_path / "file"))
    with pytest.raises(InstallError, match="set JAXMEM_TARGETS_DIR to a folder"):
        install_compilers("tpu")


def test_too_little_room_is_said_before_anything_is_loaded(installer, monkeypatch):
    monkeypatch.setitem(_install.SIZES, "tpu", 2**60)
    with pytest.raises(InstallError, match="of free space"):
        install_compilers("tpu")
    assert not installer


def test_other_systems_have_no_compilers(installer, monkeypatch):
    monkeypatch.setattr(_install, "_SYSTEM", "plan9")
    with pytest.raises(InstallError, match="Linux alone"):
        install_compilers("gpu")


def test_a_kind_that_there_is_not():
    with pytest.raises(ValueError, match="'all', 'gpu', 'tpu'"):
        install_compilers("npu")


def test_folders_are_listed_and_removed(installer, tmp_path):
    install_compilers("all")
    other = tmp_path / "targets" / "0.9.0" / "cpython-310" / "tpu"
    distribution(other, "libtpu", "0.0.30")
    found = {(f.kind, f.used): f for f in chips.installed_folders()}
    assert set(found) == {("gpu", True), ("tpu", True), ("tpu", False)}
    old = found["tpu", False]
    assert old.jax_version == "0.9.0" and old.packages == {"libtpu": "0.0.30"}
    for folder in found.values():
        chips.remove_folder(folder)
    assert [*(tmp_path / "targets").iterdir()] == []
    assert not chips.get_target("h100", check=False).available


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"JAXMEM_TARGETS_DIR": "/a/b"}, "/a/b"),
        ({"XDG_DATA_HOME": "/data"}, "/data/jaxmem/targets"),
        ({"HOME": "/home/me"}, "/home/me/.local/share/jaxmem/targets"),
    ],
)
def test_where_the_folder_is(variables, folder, monkeypatch):
    for name in ("JAXMEM_TARGETS_DIR", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", "linux")
    assert str(_folder.targets_dir()) == folder
    assert jax.__version__ in _folder.own_dir("gpu").parts


def test_workers_have_the_folder_first_on_their_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "own")
    assert pool._path_of(("a", "b"))["PYTHONPATH"].split(os.pathsep) == [
        "a",
        "b",
        "own",
    ]
    assert pool._path_of(()) == {"PYTHONPATH": "own"}
    monkeypatch.delenv("PYTHONPATH")
    assert pool._path_of(()) == {}


def test_a_worker_from_before_an_installation_is_replaced(monkeypatch):
    started, folders = [], ()

    class Idle(pool.Worker):
        alive = True

        def __init__(self, log, folders):
            self.folders = folders
            started.append(folders)

        def close(self):
            self.alive = False

    monkeypatch.setattr(pool, "Worker", Idle)
    monkeypatch.setattr(pool, "compiler_folders", lambda: folders)
    one = pool.Pool()
    first = one.worker()
    assert one.worker() is first
    folders = ("new",)
    assert one.worker() is not first and not first.alive
    assert started == [(), ("new",)]
    one.close()


def test_the_installer_is_pip_or_uv(monkeypatch):
    assert _install._installer()[:4] == [sys.executable, "-m", "pip", "install"]
    monkeypatch.setattr(_install.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(_install.shutil, "which", lambda name: "/bin/uv")
    assert _install._installer()[:3] == ["uv", "pip", "install"]
    monkeypatch.setattr(_install.shutil, "which", lambda name: None)
    with pytest.raises(InstallError, match="-m ensurepip"):
        _install._installer()


def wheel(folder, name, version):
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/__init__.py", "")
        file.writestr(f"{info}/METADATA", head)
        file.writestr(f"{info}/WHEEL", kind)
        file.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
def test_pip_takes_wheels_from_a_folder(monkeypatch, tmp_path):
    """What the error without a connection tells to do, with the true pip."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "libtpu", libtpu_version())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    (tpu,) = install_compilers("tpu")
    assert tpu.packages == {"libtpu": libtpu_version()}
    assert (tpu.path / "libtpu" / "__init__.py").exists()


# -- with the compilers themselves

COMPILERS = ("jax_plugins", "jax_cuda", "nvidia", "libtpu")
SAME = """
import json, sys, jax, jax.numpy as jnp, jaxmem
jax.devices()
def loss(ws, x):
    body = lambda x, w: (jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) + x, None)
    return jnp.sum(jax.lax.scan(body, x, ws)[0] ** 2)
step = lambda ws, x: jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws, x))
sizes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 2, 128, 128), (64, 128))]
target = {t.name: t for t in jaxmem.targets()}[sys.argv[1]]
how = {"target": target, "donate_argnums": 0, "cache": False, "full": True}
report = jaxmem.estimate(step, *sizes, **how)
rows = [[b.bytes, b.operation] for b in report.at_peak]
print(json.dumps([target.compiler, report.peak_bytes, report.temp_bytes, rows]))
"""


def site_packages(folder, without):
    """Links to what is installed here, as the packages of a new environment."""
    folder.mkdir(parents=True)
    for entry in pathlib.Path(sysconfig.get_path("purelib")).iterdir():
        if not without or not entry.name.lower().startswith(COMPILERS):
            (folder / entry.name).symlink_to(entry)
    return folder


def links_to_compilers(folder):
    folder.mkdir(parents=True)
    for entry in pathlib.Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name.lower().startswith(COMPILERS):
            (folder / entry.name).symlink_to(entry)


def new_environment(folder, without):
    """The Python of an environment with or without compilers."""
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    packages = site_packages(folder / "packages", without)
    (site / "packages.pth").write_text(f"{packages}\n")
    return str(folder / "venv" / "bin" / "python")


def run_in_environment(folder, without, target):
    """What SAME prints there."""
    done = subprocess.run(
        [new_environment(folder, without), "-c", SAME, target],
        env=os.environ | {"PYTHONPATH": ROOT, "JAX_PLATFORMS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "tpu-v5e"])
def test_the_folder_gives_the_bytes_of_the_environment(target, tmp_path, monkeypatch):
    """And no message in a user's program."""
    monkeypatch.undo()
    monkeypatch.setenv("JAXMEM_TARGETS_DIR", str(tmp_path / "targets"))
    _compilers.forget_compilers()
    if "environment" not in chips.get_target(target, check=False).compiler:
        pytest.skip("the environment has no compiler to compare to")
    inside, _ = run_in_environment(tmp_path / "inside", False, target)
    links_to_compilers(_folder.own_dir("tpu" if "tpu" in target else "gpu"))
    beside, said = run_in_environment(tmp_path / "beside", True, target)
    assert inside[0].endswith("of the environment")
    assert beside[0].endswith("of jaxmem's folder")
    assert beside[1:] == inside[1:]
    assert said == ""
