"""What is logged of devices with and without statistics, and where."""

import json
import logging
import types
import warnings

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import jaxmem
from jaxmem.monitoring import _sinks
from tests.memory import dumps

GIB = 2**30
STATISTICS = {
    "peak_bytes_in_use": 14 * GIB,
    "bytes_in_use": 12 * GIB,
    "bytes_limit": 16 * GIB,
    "largest_free_block_bytes": 3 * GIB,
    "num_allocs": 7,
}


class Gpu:
    """A device that keeps statistics."""

    def __init__(self, number: int = 0, **changed: int):
        self.id, self.stats = number, {**STATISTICS, **changed}

    def memory_stats(self):
        return self.stats

    def __str__(self):
        return f"cuda:{self.id}"


@pytest.fixture
def gpus(monkeypatch):
    def use(*devices):
        monkeypatch.setattr(jax, "local_devices", lambda: list(devices))

    return use


# -- figures


def test_a_gpu(gpus):
    gpus(Gpu())
    monitor = jaxmem.monitor("13.5GiB", every=2)
    assert monitor(1) is None and not monitor.last
    assert (
        monitor(2)
        == monitor.last
        == {
            "peak_bytes": 14 * GIB,
            "bytes_in_use": 12 * GIB,
            "bytes_limit": 16 * GIB,
            "largest_free_block_bytes": 3 * GIB,
            "fragmentation": 0.25,
            "predicted_peak_bytes": 13.5 * GIB,
        }
    )
    assert monitor.row() == "memory 12.0/16.0 GiB, peak 14.0 GiB, predicted 13.5 GiB"
    assert monitor.postfix()["memory"] == "12.0/16.0 GiB"


def test_a_pool_that_grows(gpus):
    gpus(Gpu(pool_bytes=13 * GIB, largest_free_block_bytes=GIB, bytes_in_use=700))
    figures = jaxmem.monitor().figures()
    assert figures["fragmentation"] == pytest.approx(12 / 13, abs=1e-6)
    assert jaxmem.monitor().postfix()["memory"] == "700 B/16.0 GiB"


def test_of_several_devices_the_fullest_counts_and_each_has_figures(gpus):
    gpus(Gpu(), Gpu(3, peak_bytes_in_use=15 * GIB, largest_free_block_bytes=GIB))
    figures = jaxmem.monitor().figures()
    assert figures["peak_bytes"] == figures["device_3/peak_bytes"] == 15 * GIB
    assert figures["device_0/peak_bytes"] == 14 * GIB
    assert figures["largest_free_block_bytes"] == GIB
    assert figures["fragmentation"] == 0.75
    alone = jaxmem.monitor(device=Gpu()).figures()
    assert alone["peak_bytes"] == 14 * GIB and "device_0/peak_bytes" not in alone


def test_what_was_predicted(gpus):
    gpus(Gpu())
    report = dumps.report(dumps.stack_result(), name="train")
    plan = types.SimpleNamespace(scheduled=report, predicted_bytes=3)
    of_graph = types.SimpleNamespace(scheduled=None, predicted_bytes=3)
    predicted = [report, plan, of_graph, 2**20, "1MiB", None]
    peaks = [jaxmem.monitor(each).predicted_bytes for each in predicted]
    assert peaks == [report.peak_bytes, report.peak_bytes, 3, 2**20, 2**20, None]


def test_the_cpu_keeps_no_statistics_and_says_so_once():
    x = jnp.ones((50, 50))
    with pytest.warns(UserWarning, match="keeps no memory statistics: live arrays"):
        monitor = jaxmem.monitor(every=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figures = monitor(0)
        monitor(1)
    assert set(figures) == {"live_bytes", "live_arrays"}
    assert figures["live_bytes"] >= x.nbytes
    assert monitor.row().startswith("live ")
    with pytest.warns(UserWarning, match="nothing is measured"):
        assert jaxmem.monitor(live=False).figures() == {}


def test_live_arrays_where_they_are_asked_for(gpus):
    gpus(Gpu())
    figures = jaxmem.monitor(live=True).figures()
    assert figures["live_arrays"] >= 0 and figures["peak_bytes"] == 14 * GIB


# -- where to


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_is_added_to(gpus, tmp_path):
    gpus(Gpu())
    path = tmp_path / "memory.jsonl"
    for first in (0, 4):
        with jaxmem.monitor(log_to=path, every=2) as monitor:
            for i in range(first, first + 4):
                monitor(i)
    lines = lines_of(path)
    assert [line["step"] for line in lines] == [0, 2, 4, 6]
    assert lines[0]["peak_bytes"] == 14 * GIB and lines[0]["process"] == 0
    assert lines[0]["time"] <= lines[1]["time"]


def test_each_process_has_its_own_file(gpus, tmp_path, monkeypatch):
    gpus(Gpu())
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    with jaxmem.monitor(log_to=str(tmp_path / "memory.jsonl")) as monitor:
        monitor(0)
    (line,) = lines_of(tmp_path / "memory.2.jsonl")
    assert line["process"] == 2


class Writer:
    """As torch's and tensorboardX's."""

    def __init__(self):
        self.seen = {}

    def add_scalar(self, tag, value, global_step):
        self.seen[tag] = value, global_step


class FlaxWriter(Writer):
    scalar = Writer.add_scalar
    add_scalar = None


class Run:
    """As of Weights & Biases."""

    def log(self, data, step=None):
        self.seen = data, step


def test_writers_runs_and_functions(gpus):
    gpus(Gpu())
    writer, flax_writer, run, called = Writer(), FlaxWriter(), Run(), []
    record = lambda figures, step: called.append((figures, step))
    monitor = jaxmem.monitor(log_to=[writer, flax_writer, run, record], every=5)
    figures = monitor(10)
    assert writer.seen == flax_writer.seen
    assert writer.seen["memory/peak_bytes"] == (14 * GIB, 10)
    assert run.seen[1] == 10 and run.seen[0]["memory/fragmentation"] == 0.25
    assert called == [(figures, 10)]
    monitor.close()  # which leaves theirs open


def test_tensorboard_of_flax(gpus, tmp_path):
    tensorboard = pytest.importorskip("flax.metrics.tensorboard")
    gpus(Gpu())
    writer = tensorboard.SummaryWriter(tmp_path)
    jaxmem.monitor(log_to=writer)(0)
    writer.close()
    assert list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "log_to", [3, None, logging.getLogger("x"), Writer, "memory.txt", [None], ""]
)
def test_what_is_no_place_to_write_to(gpus, log_to):
    gpus(Gpu())
    with pytest.raises((TypeError, ValueError), match="log_to="):
        jaxmem.monitor(log_to=log_to)


def test_steps_are_numbers(gpus):
    gpus(Gpu())
    monitor = jaxmem.monitor()
    for step in ("1", -1, 1.5):
        with pytest.raises((TypeError, ValueError), match="step="):
            monitor(step)


# -- progress bars


def test_in_rich_and_tqdm(gpus):
    gpus(Gpu())
    monitor = jaxmem.monitor("14GiB")
    console = Console(width=80, record=True)
    console.print(monitor)
    assert console.export_text().strip() == monitor.row()
    tqdm = pytest.importorskip("tqdm")
    with tqdm.tqdm(range(2), disable=None) as bar:
        bar.set_postfix(monitor.postfix())
        assert "predicted=14.0 GiB" in bar.postfix


def test_a_file_that_cannot_be_opened_is_told_at_the_call(tmp_path):
    path = tmp_path / "none" / "memory.jsonl"
    with pytest.raises(ValueError, match="log_to=.*can be written"):
        _sinks.sinks_of(path)
