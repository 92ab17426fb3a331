"""The search of `benchmarks.readings.peaks`, on steps whose bytes are a formula."""

import types

import jax
import pytest

import jaxmem
from benchmarks.readings.peaks import GIB, Peaks
from jaxmem.memory import REFUSED, DoesNotFit
from jaxmem.memory._batch_search import FURTHER, unit_of

CHIPS = {"h100": 80 * GIB, "l4": 22 * GIB, "t4": 15 * GIB}
STATE = jax.ShapeDtypeStruct((2**28,), "float32")  # 1 GiB


def searched(monkeypatch, peak):
    """The peaks of a step, after a search on each chip, and the batches found."""

    def estimate(step, state, batch, *, target, **_):
        if (found := peak(batch.shape[0])) == REFUSED:
            raise DoesNotFit("the step")
        return types.SimpleNamespace(peak_bytes=found)

    def args(batch):
        return (STATE,), jax.ShapeDtypeStruct((batch,), "int32")

    monkeypatch.setattr(jaxmem, "estimate", estimate)
    peaks = Peaks(lambda: None, args)
    return peaks, {chip: peaks.largest(chip, room) for chip, room in CHIPS.items()}


@pytest.mark.parametrize("example", [0.003, 0.21, 1.7, 9.1])
def test_a_line_needs_few_compiles(monkeypatch, example):
    peak = lambda batch: (3 + example * batch) * GIB
    peaks, largest = searched(monkeypatch, peak)
    for chip, room in CHIPS.items():
        found, exact = largest[chip], int((room / GIB - 3) / example)
        assert found <= exact < found + unit_of(exact)
        assert found in (0, *peaks.seen[chip])  # what is named was compiled
    assert sum(map(len, peaks.seen.values())) <= 8 + len(FURTHER) * len(CHIPS)


def test_a_first_batch_beside_which_the_gradients_are_never_all_there(monkeypatch):
    """Its peak tells nothing of an example: it leads no further than some times."""
    peaks, largest = searched(monkeypatch, lambda batch: (1.5 + 0.05 * batch) * GIB)
    assert largest["h100"] == 1536
    assert max(peaks.seen["h100"]) < 2 * largest["h100"]


def test_what_the_compiler_recomputes_by_itself_is_used(monkeypatch):
    """From 150 examples on the step takes less, as XLA makes it."""
    peak = lambda batch: (2 + (0.4 if batch < 150 else 0.3) * batch) * GIB
    _, largest = searched(monkeypatch, peak)
    assert largest["h100"] == 256
    assert largest["l4"] == 50


def test_a_batch_that_fits_beyond_one_that_does_not(monkeypatch):
    """Where the step would not fit, XLA recomputes: 50 examples take less than 42."""

    def peak(batch):
        return (0.5 if batch <= 40 else 0.55 if batch <= 44 else 0.3) * batch * GIB

    peaks, _ = searched(monkeypatch, peak)
    peaks.seen.clear()
    assert peaks.largest("l4", CHIPS["l4"], 40) == 72
    assert peaks.seen["l4"][42] > CHIPS["l4"]


def test_what_is_refused_is_bisected(monkeypatch):
    peak = lambda batch: REFUSED if batch > 5 else (2 + 4 * batch) * GIB
    _, largest = searched(monkeypatch, peak)
    assert largest == {"h100": 5, "l4": 5, "t4": 3}


def test_no_example_fits(monkeypatch):
    _, largest = searched(monkeypatch, lambda batch: (90 + batch) * GIB)
    assert largest == dict.fromkeys(CHIPS, 0)
