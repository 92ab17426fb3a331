"""Live bytes against a count of every byte, and rows that add up."""

import numpy as np
import pytest

from jaxmem.memory.buffers.assignment import (
    BufferValue,
    LiveRanges,
    parse_buffer_assignment,
    parse_live_range,
)
from jaxmem.memory.buffers.live import LiveMap, temporaries
from tests.memory import dumps


def live_map(result):
    dump = result["dump"]
    allocations = parse_buffer_assignment(dump["buffer_assignment"])
    values = temporaries(allocations, result["memory"]["temp"])
    return LiveMap(values, parse_live_range(dump["live_range"]))


def occupied(found, step, size):
    """Marks every byte of every live value."""
    marks = np.zeros(size, bool)
    for value, start, end in zip(found.values, found.starts, found.ends, strict=True):
        if start <= step <= end:
            marks[value.offset : value.offset + value.size] = True
    return int(marks.sum())


@pytest.fixture(params=["stack", "bert", "unrolled"])
def result(request):
    return {
        "stack": dumps.stack_result,
        "bert": dumps.bert_result,
        "unrolled": lambda: dumps.bert_result(scan=False),
    }[request.param]()


def test_live_bytes_are_the_bytes_occupied(result):
    found, size = live_map(result), result["memory"]["temp"]
    for step in range(0, found.steps, 7):
        assert found.bytes_at(step) == occupied(found, step, size)


@pytest.mark.fast("stack", "bert")
def test_the_peak_is_the_fullest_step(result):
    found, size = live_map(result), result["memory"]["temp"]
    counts = [occupied(found, step, size) for step in range(found.steps)]
    assert found.bytes_at(found.peak_step()) == max(counts)
    assert max(counts) <= size


def test_bounds_are_bounds(result):
    found = live_map(result)
    bounds = found.bounds()
    assert len(bounds) == found.steps
    for step in range(0, found.steps, 11):
        assert bounds[step] >= found.bytes_at(step)


def test_samples_keep_the_peak(result):
    found = live_map(result)
    samples = found.samples(10)
    assert found.peak_step() in samples and 10 <= len(samples) <= 11
    assert samples == sorted(set(samples))


def test_stacked_residuals_are_one_buffer():
    found = live_map(dumps.stack_result())
    held = found.values_at(found.peak_step())
    stacked = [h for h in held if h.value.shape.startswith("f32[5,64,32]")]
    assert stacked and all(h.bytes == 5 * 64 * 32 * 4 for h in stacked)


def test_values_that_share_bytes_count_once():
    values = [
        BufferValue("a", (), 100, 0, "u8[100]"),
        BufferValue("b", (), 100, 0, "u8[100]"),  # in place of a
        BufferValue("c", (), 60, 80, "u8[60]"),  # overlaps both by 20
        BufferValue("d", (), 10, 200, "u8[10]"),
        BufferValue("t", (), 8, 300, "u8[8]"),  # without a live range: nowhere
    ]
    ranges = {
        ("a", ()): (0, 2),
        ("b", ()): (2, 4),
        ("c", ()): (2, 3),
        ("d", ()): (5, 5),
    }
    found = LiveMap(values, LiveRanges(tuple("vwxyz") + ("end",), ranges))
    assert [found.bytes_at(i) for i in range(6)] == [100, 100, 140, 140, 100, 10]
    assert list(found.bounds()) == [100, 100, 160, 160, 100, 10]
    assert [(h.value.name, h.bytes) for h in found.values_at(2)] == [
        ("b", 100),
        ("c", 40),
    ]
    assert found.peak_step() == 2


def test_two_temporary_allocations_do_not_overlap():
    text = """BufferAssignment:
allocation 0: size 64, preallocated-temp:
 value: <1 a @0> (size=64,offset=0): f32[16]{0}
allocation 1: size 32, color 1, preallocated-temp:
 value: <2 b @1> (size=32,offset=0): f32[8]{0:S(1)}
allocation 2: size 32, preallocated-temp:
 value: <3 c @0> (size=32,offset=0): f32[8]{0}
 value: <4 t{} @0> (size=16,offset=0): (f32[8]{0}, f32[8]{0})
"""
    allocations = parse_buffer_assignment(text)
    places = [(v.name, v.offset) for v in temporaries(allocations, 100)]
    assert places == [("a", 0), ("c", 64)]
    places = [(v.name, v.offset) for v in temporaries(allocations, 128)]
    assert places == [("a", 0), ("c", 64), ("b", 96)]


def test_no_temporaries_at_all():
    found = LiveMap([], LiveRanges(("x",), {}))
    assert found.peak_step() == 0 and found.values_at(0) == []
