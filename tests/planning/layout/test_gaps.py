"""Buffers that are not there all the time, or not all of them, and aligned ones."""

import pytest
from hypothesis import given, settings

from jaxmem import planning
from jaxmem.planning import Buffer, Gap
from tests.planning.layouts import buffer_lists, least_height, sound


@given(buffer_lists(most=14, size=12))
@settings(max_examples=40, deadline=None)
def test_layouts_with_gaps_are_sound(buffers):
    found = planning.layout(buffers, time_limit=0.05)
    found.check()
    assert sound(found)
    assert found.load <= found.lower_bound <= found.height
    for by in ("size", "lifetime"):
        simple = planning.best_fit(buffers, by)
        simple.check()
        assert sound(simple)
        assert found.height <= simple.height


@given(buffer_lists(most=5, size=4, time=5))
@settings(max_examples=40, deadline=None)
def test_proven_is_proven_with_gaps_and_alignments(buffers):
    found, least = planning.layout(buffers, time_limit=0.1), least_height(buffers)
    assert found.lower_bound <= least <= found.height
    if found.optimal:
        assert found.height == least


def test_what_is_not_there_leaves_its_place_to_others():
    whole = [Buffer("a", 0, 9, 4), Buffer("b", 3, 6, 4)]
    assert planning.layout(whole).height == 8
    gone = [Buffer("a", 0, 9, 4, gaps=(Gap(3, 6),)), whole[1]]
    found = planning.layout(gone)
    assert (found.height, found.load, found.optimal) == (4, 4, True)
    half = [Buffer("a", 0, 9, 4, gaps=(Gap(3, 6, (0, 1)),)), whole[1]]
    found = planning.layout(half)
    assert (found.height, found.load, found.optimal) == (5, 5, True)
    assert found.offsets == {"a": 0, "b": 1}


def test_one_alignment_for_all_and_one_of_its_own():
    buffers = [Buffer(0, 0, 3, 5), Buffer(1, 0, 3, 5, alignment=3), Buffer(2, 0, 3, 1)]
    found = planning.layout(buffers, alignment=4)
    assert all(offset % 4 == 0 for offset in found.offsets.values())
    assert found.offsets[1] % 12 == 0
    assert sound(found)
    assert [b.alignment for b in found.buffers] == [4, 12, 4]
    simple = planning.best_fit(buffers, alignment=256)
    assert sorted(simple.offsets.values()) == [0, 256, 768]
    assert simple.offsets[1] in (0, 768)


def test_check_finds_what_is_not_aligned_and_what_a_gap_does_not_cover():
    buffers = (Buffer("a", 0, 9, 4, 2, (Gap(3, 6, (0, 2)),)), Buffer("b", 3, 6, 4))
    planning.Layout(buffers, {"a": 0, "b": 2}, 6).check()
    with pytest.raises(ValueError, match="a lies at 3, .* no multiple of its align"):
        planning.Layout(buffers, {"a": 3, "b": 6}, 6).check()
    with pytest.raises(ValueError, match="buffers a and b overlap: .* alive at 3"):
        planning.Layout(buffers, {"a": 0, "b": 1}, 6).check()


def test_json_has_gaps_and_alignments():
    gaps = Gap(1, 2), Gap(3, 4, (0, 1))
    buffers = [Buffer("x", 0, 5, 4, 2, gaps), Buffer(1, 2, 5, 6)]
    found = planning.layout(buffers)
    assert planning.Layout.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    "gaps, message",
    [
        ([(0, 2)], r"must lie within \[1, 9\), and 0-2 does not"),
        ([(2, 5), (4, 6)], "must not overlap, as 2-5 and 4-6 do"),
        ([(2, 5, (0, 9))], "windows must lie within 8 bytes, unlike 2-5@0:9"),
        ([(5, 2)], "gap: lower must be below upper, got 5 and 2"),
        ([(2, 5, (3, 3))], "window must begin below its end, got 3 and 3"),
    ],
)
def test_gaps_that_are_none_are_refused(gaps, message):
    with pytest.raises(ValueError, match=message):
        Buffer("x", 1, 9, 8, gaps=tuple(Gap(*gap) for gap in gaps))


@pytest.mark.parametrize("size", [2**61, 2**70])
def test_what_cannot_be_counted_is_refused(size):
    with pytest.raises(ValueError, match=f"buffer 0: size={size}: an int, at least 0"):
        Buffer(0, 0, 1, size)
    with pytest.raises(ValueError, match="buffer 0: upper="):
        Buffer(0, 0, 2**63, 1)
    with pytest.raises(ValueError, match="alignment: .* more than can be counted"):
        planning.layout([Buffer(k, 0, 1, 1) for k in range(3)], alignment=2**60)
