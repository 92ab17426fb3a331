"""Scans that go backwards through the host's arrays, as over offloaded residuals."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.ir import host_slices
from jaxmem.ir.host_slices import AFFECTED
from jaxmem.linting.rules import misread_slices
from tests.memory.test_estimate import needs_h100
from tests.memory.test_wrong_slices import N, layer, loss, offloaded

CHECK = "misread from the host"


@pytest.fixture
def affected(monkeypatch):
    for module in (host_slices, misread_slices):
        monkeypatch.setattr(module, "AFFECTED", True)


def test_of_a_policy_that_offloads(affected):
    step, args = offloaded()
    (found,) = jaxmem.lint(step, *args).of(CHECK)
    assert found.severity == "error" and found.bytes == N * 4096 * 256 * 4
    assert "test_wrong_slices.py" in found.where
    assert host_slices.COPIES in found.remedy and "jaxmem.schedule" in found.remedy
    scheduled = jaxmem.schedule(step, donate_argnums=())
    assert not jaxmem.lint(scheduled, *args).of(CHECK)


def test_of_residuals_on_the_device(affected):
    _, args = offloaded()
    step = jax.grad(lambda ws, x: loss(ws, x, layer))
    assert not jaxmem.lint(step, *args).of(CHECK)


def test_of_a_forward_scan(affected):
    """Its index is the loop's counter."""
    away = lambda x: jax.device_put(x, jax.memory.Space.Host)

    def step(x):
        body = lambda x, _: (jnp.sin(x), away(x))
        return jax.lax.scan(body, x, length=N)

    assert not jaxmem.lint(step, jnp.ones(512)).of(CHECK)


def test_of_versions_that_read_right(monkeypatch):
    monkeypatch.setattr(misread_slices, "AFFECTED", False)
    step, args = offloaded()
    assert not jaxmem.lint(step, *args).of(CHECK)


@needs_h100
@pytest.mark.slow
def test_a_compiled_step_tells_where():
    step, args = offloaded()
    found = jaxmem.lint(step, *args, target="h100").of(CHECK)
    assert len(found) == AFFECTED
    for one in found:
        last = (N - 1) * 4096 * 256 * 4
        assert f"read at byte 0, where its index says {last:,}" in one.what
