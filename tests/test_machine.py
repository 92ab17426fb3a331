"""Machines as users have them: no compilers, a home that cannot be written, no home."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem import chips
from tests.cli.conftest import steps as steps
from tests.cli.invoking import invoke
from tests.sets import some_fast

ROOT = pathlib.Path(jaxmem.__file__).parents[1]
W, X = jnp.ones((8, 8)), jnp.ones((4, 8))
KINDS = {"h100": "gpu", "tpu-v5e": "tpu"}


def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


@pytest.fixture
def no_compilers(monkeypatch, tmp_path):
    monkeypatch.setattr("jaxmem.chips._compilers.version_of", lambda package: None)
    monkeypatch.setenv("JAXMEM_TARGETS_DIR", str(tmp_path / "targets"))
    chips._compilers.forget_compilers()
    yield
    chips._compilers.forget_compilers()


CALLS = {
    "estimate": lambda chip: jaxmem.estimate(step, W, X, target=chip),
    "lint": lambda chip: jaxmem.lint(step, W, X, target=chip),
    "advise": lambda chip: jaxmem.advise(step, W, X, target=chip, budget="1GiB"),
    "schedule": lambda chip: jaxmem.schedule(step, target=chip),
    "budget": lambda chip: jaxmem.schedule(step, "1GiB", target=chip),
    "plan": lambda chip: jaxmem.schedule(step).plan(W, X, target=chip),
    "max_batch": lambda chip: jaxmem.max_batch(step, lambda n: (W, X), chip, "1GiB"),
}


@pytest.mark.parametrize("chip", KINDS)
@pytest.mark.parametrize("call", CALLS)
def test_without_compilers_a_call_tells_what_to_type(no_compilers, call, chip):
    with pytest.raises(RuntimeError, match=f"targets --install {KINDS[chip]}"):
        CALLS[call](chip)


COMMANDS = [
    "estimate user_steps:plain",
    "max-batch user_steps:sized_step",
    "plan user_steps:plain",
    "advise user_steps:plain",
    "lint user_steps:plain",
    "demo",
]


@pytest.mark.parametrize("chip", KINDS)
@pytest.mark.parametrize("line", COMMANDS)
def test_without_compilers_a_command_tells_what_to_type(
    no_compilers, steps, line, chip
):
    result = invoke(*line.split(), "--target", chip)
    assert result.exit_code == 3
    (said,) = result.stderr.splitlines()
    assert f"targets --install {KINDS[chip]}" in said


def test_without_compilers_the_cpu_is_compiled_for(no_compilers):
    assert jaxmem.estimate(step, W, X).peak_bytes > 0
    assert not any(t.available for t in jaxmem.targets() if t.name != "cpu")


CODE = """
import sys, warnings
import jax, jax.numpy as jnp
import jaxmem

def step(w, x):
    loss = lambda w: jnp.sum(jnp.tanh(jnp.sin(x @ w) @ w.T) ** 2)
    return w - 0.1 * jax.grad(loss)(w)

W, X = jnp.ones((8, 8)) / 8, jnp.ones((64, 8))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    report = jaxmem.estimate(step, W, X, donate_argnums=0)
    how = {"target": "cpu", "donate_argnums": 0, "progress": False}
    scheduled = jaxmem.schedule(step, report.peak_bytes, **how)
    scheduled(W * 1, X)
texts = [str(w.message) for w in caught if "jaxmem" in str(w.message)]
print(len(texts), *texts)
"""
USERS = {"who has a home that is only read": 65534, "without a home": 54321}


@pytest.fixture
def open_folder():
    """A folder that every user reaches, unlike pytest's own."""
    folder = pathlib.Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("user", some_fast(USERS, "who has a home that is only read"))
def test_a_user_who_cannot_keep_what_is_found(open_folder, user):
    """All works, with one warning that says what to set."""
    if shutil.which("setpriv") is None or os.geteuid():
        pytest.skip("only root, with setpriv, runs a process as another user")
    temporary = open_folder / "tmp"
    temporary.mkdir()
    temporary.chmod(0o777)
    known = ("PATH", "LANG", "LD_LIBRARY_PATH")
    environment = {k: os.environ[k] for k in known if k in os.environ}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    home = open_folder / "home"
    home.mkdir(mode=0o555)
    if user == "who has a home that is only read":
        environment["HOME"] = str(home)
    # who may read all, so that a Python in root's own folders is reached
    command = f"setpriv --reuid {USERS[user]} --regid {USERS[user]} --clear-groups"
    command += " --inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
    run = lambda code: subprocess.run(
        [*command.split(), sys.executable, "-c", code],
        env=environment,
        cwd=open_folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if (reached := run("")).returncode:
        pytest.skip(f"setpriv runs nothing here: {reached.stderr.strip()}")
    done = run(CODE)
    assert done.returncode == 0, done.stderr
    count, _, text = done.stdout.partition(" ")
    assert count == "1" and "cannot store" in text and "JAXMEM_CACHE_DIR" in text
    assert not any(home.iterdir()) and not any(temporary.iterdir())
