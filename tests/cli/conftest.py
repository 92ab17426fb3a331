"""A folder with a user's modules, and a report in the place of a compile."""

import sys
from types import SimpleNamespace

import pytest

import jaxmem
from tests.cli import steps as sources

GIB = 2**30
MODULES = {
    "user_steps": sources.PLAIN + sources.ADAM,
    "user_linen": sources.LINEN,
    "user_nnx": sources.NNX,
    "user_equinox": sources.EQUINOX,
    "user_broken": "import no_such_library",
    "user_exits": "raise SystemExit(0)",
}


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """The current folder, with modules of a user's in it."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def calls(monkeypatch):
    """Puts a report of 2 GiB in the place of a compile; what it was asked for."""
    seen = []

    def estimate(fn, *args, **options):
        seen.append((fn, args, options))
        chips = {t.name: t.memory_bytes for t in jaxmem.targets()}
        memory = chips[options.get("target", "cpu")]
        return SimpleNamespace(peak_bytes=2 * GIB, memory_bytes=memory, seconds=None)

    monkeypatch.setattr(jaxmem, "estimate", estimate)
    monkeypatch.setattr("jaxmem.cli._options.check_target", lambda name: None)
    return seen
