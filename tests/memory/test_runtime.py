"""The figures of a device beside the estimate; a device that keeps none."""

import json
from types import SimpleNamespace

import pytest

from tests.memory import dumps


@pytest.fixture(scope="module")
def report():
    return dumps.report(dumps.stack_result(), name="train")


def fake(**stats):
    kind = "NVIDIA H100 80GB HBM3"
    return SimpleNamespace(memory_stats=lambda: stats, device_kind=kind)


def test_measured_beside_estimated(report):
    device = fake(
        peak_bytes_in_use=report.peak_bytes + 100,
        bytes_in_use=400,
        bytes_limit=4000,
        pool_bytes=1400,
        largest_free_block_bytes=750,
        num_allocs=7,
    )
    found = report.runtime(device)
    assert found.measured and found.difference == 100
    assert found.fragmentation == 0.25  # of 1000 free bytes of the pool 750 are one
    text = str(found)
    assert "NVIDIA H100" in text.splitlines()[0]
    share = f"{100 * 100 / report.peak_bytes:+.1f} %"
    assert f"+100 B ({share})" in text and "25.0 % of what is free" in text
    assert "peak, estimated" in found._repr_html_()
    assert json.loads(found.to_json())["pool_bytes"] == 1400


def test_without_a_pool_the_limit_counts(report):
    stats = {"bytes_in_use": 0, "largest_free_block_bytes": 50, "bytes_limit": 100}
    assert report.runtime(fake(**stats)).fragmentation == 0.5
    assert report.runtime(fake(bytes_limit=100)).fragmentation is None


def test_a_device_that_keeps_no_statistics(report):
    """This process runs on the CPU."""
    found = report.runtime()
    assert not found.measured
    assert found.difference is found.fragmentation is found.bytes_limit is None
    assert "absent" in str(found) and "keeps no memory statistics" in str(found)


def test_what_is_no_device(report):
    with pytest.raises(TypeError, match="device='gpu': a jax.Device"):
        report.runtime("gpu")
