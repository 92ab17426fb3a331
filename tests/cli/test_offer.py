"""In a terminal a missing compiler is offered, and installed if the user wants it."""

import os
import pathlib
import pty
import subprocess

import pytest

import jaxmem
from jaxmem.chips import _folder
from tests.chips.test_install import libtpu_version, new_environment, wheel

ROOT = str(pathlib.Path(jaxmem.__file__).parent.parent)
STEP = "import jax\nx = jax.numpy.ones(3)\ndef step(x): return x\ndef args(): return x,"


@pytest.fixture
def variables(tmp_path):
    """With a package index that is a folder with a wheel for TPUs."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "libtpu", libtpu_version())
    (tmp_path / "mine.py").write_text(STEP)
    return {k: v for k, v in os.environ.items() if k != "CI"} | {
        "PYTHONPATH": os.pathsep.join((ROOT, str(tmp_path))),
        "JAXMEM_TARGETS_DIR": str(tmp_path / "targets"),
        "JAXMEM_CACHE_DIR": str(tmp_path / "cache"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
    }


def in_terminal(python: str, target: str, answer: str, variables: dict[str, str]):
    """(exit code, what the terminal shows) of an estimate with an answer typed."""
    mine, its = pty.openpty()
    command = f"-m jaxmem estimate mine:step --args mine:args --target {target}"
    streams = {"stdin": its, "stdout": its, "stderr": its, "env": variables}
    with subprocess.Popen([python, *command.split()], **streams) as process:
        os.close(its)
        shown, answered = "", False
        while chunk := _read(mine):
            shown += chunk
            if not answered and "[y/N]" in shown:
                os.write(mine, f"{answer}\n".encode())
                answered = True
        os.close(mine)
    return process.returncode, shown


def _read(terminal: int) -> str:
    try:
        return os.read(terminal, 4096).decode(errors="replace")
    except OSError:  # Linux: the other side has closed it
        return ""


@pytest.mark.slow
def test_a_missing_compiler_is_offered_in_a_terminal(variables, tmp_path):
    python = new_environment(tmp_path / "new", without=True)
    code, shown = in_terminal(python, "h100", "n", variables)
    assert code == 3 and "cannot compile for h100 here" in shown
    assert "Install it now?" in shown and not (tmp_path / "targets").exists()
    # accepted, and the index has none for a GPU
    code, shown = in_terminal(python, "h100", "y", variables)
    assert code == 3 and "gpu: installing jax-cuda13-plugin" in shown
    assert "could not be installed" in shown and "Traceback" not in shown
    # accepted, and installed; whether an empty wheel compiles is not asked
    _, shown = in_terminal(python, "tpu-v5e", "y", variables)
    assert "tpu: installed" in shown and "Traceback" not in shown
    (folder,) = (tmp_path / "targets").glob("*/*/tpu")
    assert _folder.versions_in(folder) == {"libtpu": libtpu_version()}
