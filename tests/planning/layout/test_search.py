"""Layouts: sound, optimal where that can be known, and said so where not."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.layout import guillotine
from jaxmem import planning
from jaxmem.planning import Buffer, NoLayoutError
from jaxmem.planning.layout.exact import LayoutSearch, LayoutSearchOptions
from jaxmem.planning.layout.problem import make_problem


def pinwheels(count, seed):
    """The same, of pinwheels side by side: five pieces that no cut takes apart."""
    random = np.random.default_rng(seed)
    pieces = []
    for k in range(count):
        x1, x2 = np.sort(random.choice(np.arange(1, 10), 2, replace=False))
        y1, y2 = np.sort(random.choice(np.arange(1, 100), 2, replace=False))
        t = 10 * k
        pieces += [
            (t, t + x2, y1),
            (t + x2, t + 10, y2),
            (t + x1, t + 10, 100 - y2),
            (t, t + x1, 100 - y1),
            (t + x1, t + x2, y2 - y1),
        ]
    return [Buffer(i, int(a), int(b), int(s)) for i, (a, b, s) in enumerate(pieces)]


some_buffers = st.lists(
    st.tuples(st.integers(0, 8), st.integers(1, 5), st.integers(0, 12)), max_size=25
).map(lambda rows: [Buffer(i, a, a + n, s) for i, (a, n, s) in enumerate(rows)])
few_buffers = some_buffers.map(
    lambda buffers: [Buffer(b.id, b.lower, b.upper, b.size % 5) for b in buffers[:9]]
)
# Six bytes are alive all the time, and seven are needed.
JAMMED = [
    Buffer(i, *row)
    for i, row in enumerate(
        [(0, 1, 6), (1, 2, 5), (2, 3, 3), (1, 4, 1), (3, 4, 1)]
        + [(2, 5, 2), (4, 5, 2), (3, 6, 2), (5, 6, 3), (5, 6, 1)]
    )
]


def fits(buffers, height, placed=()):
    """Whether some whole offsets do, by trying all of them."""
    if len(placed) == len(buffers):
        return True
    b = buffers[len(placed)]
    beside = [
        (at, at + o.size)
        for o, at in zip(buffers, placed, strict=False)
        if o.lower < b.upper and b.lower < o.upper
    ]
    return any(
        all(top <= at or at + b.size <= low for low, top in beside)
        and fits(buffers, height, (*placed, at))
        for at in range(height - b.size + 1)
    )


def least_height(buffers):
    """The least height, from the load up."""
    buffers = sorted((b for b in buffers if b.size), key=lambda b: -b.size)
    moments = [
        [b.size for b in buffers if b.lower <= a.lower < b.upper] for a in buffers
    ]
    load = max(map(sum, moments), default=0)
    return next(h for h in itertools.count(load) if fits(buffers, h))


def overlap_free(found):
    """The check that is simple enough to be seen right."""
    at = found.offsets
    return all(
        a.upper <= b.lower
        or b.upper <= a.lower
        or at[a.id] + a.size <= at[b.id]
        or at[b.id] + b.size <= at[a.id]
        for a, b in itertools.combinations(found.buffers, 2)
    )


@given(some_buffers, st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_layouts_are_sound(buffers, seed):
    found = planning.layout(buffers, time_limit=0.1, seed=seed)
    found.check()
    assert overlap_free(found)
    assert found.load <= found.lower_bound <= found.height
    assert all(offset >= 0 for offset in found.offsets.values())


@given(some_buffers, st.sampled_from(["size", "lifetime"]))
@settings(max_examples=30, deadline=None)
def test_best_fit_is_sound(buffers, by):
    found = planning.best_fit(buffers, by)
    found.check()
    assert overlap_free(found)


@given(few_buffers)
@settings(max_examples=25, deadline=None)
def test_small_problems_are_solved_and_proven(buffers):
    found = planning.layout(buffers)
    assert found.optimal
    assert found.height == least_height(buffers)


def test_where_the_load_is_not_enough():
    found = planning.layout(JAMMED)
    assert (found.load, found.height, least_height(JAMMED)) == (6, 7, 7)
    assert found.optimal


@pytest.mark.parametrize("seed", range(3))
def test_guillotine_cuts_are_put_together(seed):
    buffers = guillotine(100, 80, 1000, seed)
    found = planning.layout(buffers, capacity=1000, time_limit=30)
    found.check()
    assert found.height == 1000
    assert found.optimal


def test_pinwheels_are_put_together():
    found = planning.layout(pinwheels(20, seed=0), time_limit=30)
    found.check()
    assert found.height == 100


def test_hard_ones_need_the_search():
    """Best fit does not do on these."""
    buffers = guillotine(150, 100, 1000, seed=0)
    simple = (planning.best_fit(buffers, by).height for by in ("size", "lifetime"))
    assert min(simple) > 1100


@pytest.mark.slow
def test_a_large_one_in_little_time():
    """A training step's shape: nested activations, and short ones within."""
    random = np.random.default_rng(0)
    layers = 3000
    sizes = random.integers(1, 100, (3, layers)) * 256
    held = [Buffer(f"a{i}", i, 2 * layers - i, int(sizes[0, i])) for i in range(layers)]
    forward = [
        Buffer(f"f{i}", i, i + 2, 8 * int(sizes[1, i])) for i in range(layers - 1)
    ]
    back = [
        Buffer(f"b{i}", 2 * layers - i, 2 * layers - i + 2, 8 * int(sizes[2, i]))
        for i in range(layers)
    ]
    found = planning.layout([*held, *forward, *back], time_limit=1)
    found.check()
    assert found.fragmentation < 0.01


def test_the_same_seed_gives_the_same_layout():
    buffers = guillotine(60, 60, 500, seed=5)
    first, second = (planning.layout(buffers, time_limit=30, seed=3) for _ in range(2))
    assert first.height == 500
    assert first.offsets == second.offsets


def test_time_without_anything_alive_splits():
    left = [Buffer(i, 0, 3, 5) for i in range(3)]
    right = [Buffer(i + 3, 7, 9, 4) for i in range(2)]
    found = planning.layout(left + right)
    assert found.height == 15
    assert sorted(found.offsets[i] for i in (3, 4)) == [0, 4]


def test_long_lived_ones_lie_at_the_bottom():
    """Where the first layout is good enough, it is the one that was asked for."""
    buffers = [Buffer("a", 0, 4, 1), Buffer("b", 0, 4, 2), Buffer("c", 1, 2, 9)]
    found = planning.layout(buffers, long_lived=["a", "b"])
    assert found.offsets == {"b": 0, "a": 2, "c": 3}


def test_no_buffers():
    found = planning.layout([])
    assert (found.height, found.load, found.offsets) == (0, 0, {})
    assert found.optimal
    empty = planning.layout([Buffer(0, 0, 1, 0)])
    assert (empty.height, empty.offsets) == (0, {0: 0})


def test_progress_is_told():
    told = []
    buffers = guillotine(60, 60, 500, seed=1)
    found = planning.layout(
        buffers, time_limit=30, progress=lambda *both: told.append(both)
    )
    heights = [height for height, _ in told]
    assert heights == sorted(heights, reverse=True)
    assert told[0][1] == 500
    assert found.height == heights[-1]


def test_capacity_below_the_load_is_refused():
    with pytest.raises(ValueError, match=r"capacity=9 bytes .* 10 bytes .* time 2"):
        planning.layout([Buffer(0, 0, 3, 4), Buffer(1, 2, 5, 6)], capacity=9)


def test_capacity_that_nothing_fits_says_the_best():
    with pytest.raises(NoLayoutError, match="there is no layout within 6 b") as error:
        planning.layout(JAMMED, capacity=6)
    assert error.value.proven
    assert error.value.best.height == 7


def test_out_of_time_says_the_best():
    buffers = guillotine(150, 100, 1000, seed=0)
    with pytest.raises(NoLayoutError, match="in 0 s: more time_limit") as error:
        planning.layout(buffers, capacity=1000, time_limit=0)
    error.value.best.check()
    assert not error.value.proven
    assert error.value.best.height > 1000


@pytest.mark.parametrize(
    "options, message",
    [
        ({"time_limit": -1}, "time_limit=-1"),
        ({"long_lived": ["x"]}, "long_lived: no buffer has the id 'x'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        planning.layout([Buffer(0, 0, 1, 1)], **options)


def test_two_buffers_of_one_id_are_refused():
    with pytest.raises(ValueError, match="two have the id 7"):
        planning.layout([Buffer(7, 0, 1, 1), Buffer(7, 1, 2, 1)])


def test_best_fit_by_something_else():
    with pytest.raises(ValueError, match="by='area'"):
        planning.best_fit([], "area")  # pyright: ignore[reportArgumentType]


def test_check_finds_what_overlaps():
    buffers = (Buffer(0, 0, 3, 4), Buffer(1, 2, 5, 6), Buffer(2, 3, 4, 4))
    planning.Layout(buffers, {0: 0, 1: 4, 2: 0}, 10).check()
    with pytest.raises(ValueError, match="buffers 0 and 1 overlap"):
        planning.Layout(buffers, {0: 0, 1: 3, 2: 9}, 10).check()
    with pytest.raises(ValueError, match="below the arena"):
        planning.Layout(buffers, {0: -1, 1: 4, 2: 0}, 10).check()


def test_json_and_back():
    found = planning.layout([Buffer("x", 0, 3, 4), Buffer(1, 2, 5, 6)])
    assert planning.Layout.from_json(found.to_json()) == found
    with pytest.raises(ValueError, match="not the JSON of a Layout"):
        planning.Layout.from_json(json.dumps({"buffers": [{}]}))


def test_table_says_height_and_bound():
    from rich.console import Console

    found = planning.layout([Buffer(0, 0, 3, 4000), Buffer(1, 2, 5, 6000)])
    console = Console(width=80)
    with console.capture() as text:
        console.print(found)
    assert "10,000 bytes" in text.get()
    assert "0.00%" in text.get()


def test_the_picture_is_written(tmp_path):
    planning.layout(guillotine(40, 30, 100, 0)).plot(tmp_path / "layout.png")
    assert (tmp_path / "layout.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to draw"):
        planning.layout([]).plot(tmp_path / "none.png")


@given(few_buffers.map(lambda buffers: [b for b in buffers if b.size]))
@settings(max_examples=25, deadline=None)
def test_an_exhausted_search_proves(buffers):
    """A unit below the least height there is nothing, and the search says how much."""
    if not buffers:
        return
    problem, least = make_problem(buffers), least_height(buffers)
    search = LayoutSearch(problem)
    whole = LayoutSearchOptions(float("inf"), whole=True)
    found = search.run(least // problem.unit, whole, float("inf"))
    assert found is not None
    assert problem.height(found) * problem.unit == least
    below = least // problem.unit - 1
    if below >= problem.load.max():
        assert search.run(below, whole, float("inf")) is None
        assert below < search.least <= least // problem.unit
