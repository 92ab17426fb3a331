"""What `None` takes, of lines that a device could have written."""

import json

import pytest

from benchmarks.device import jobs, results, table
from pallas_kernels import measured
from pallas_kernels.measured import Measured

MACHINE = {"chip": "h100", "driver": "1", "jax": "0.10.2"}
ABOUT = {"status": "done", "when": "2026-01-01", "small": False, "machine": MACHINE}


def timed(side, size, ms, which="forward", case="rms_norm"):
    about = {"case": case, "kernel": "rms_norm", "dtype": "bfloat16"}
    sized = {"elements": size, "side": side, "pass": which}
    return about | sized | {"ms": ms, "low": ms, "high": 1.1 * ms}


def pair(size, kernel, xla, which="forward"):
    return [timed("kernel", size, kernel, which), timed("XLA", size, xla, which)]


ROWS = [*pair(64, 2, 1), *pair(256, 1, 1.2), *pair(1024, 1, 2)]
ROWS += pair(1024, 1, 1.05, "backward")  # within the spread


@pytest.fixture
def folder(tmp_path):
    """Values of rms_norm that are right, and its times."""
    path = results.path_for(MACHINE, tmp_path)
    for name in ("right: rms_norm", "fast: rms_norm, bfloat16"):
        rows = ROWS if name.startswith("fast") else []
        results.append(path, ABOUT | {"job": name, "rows": rows})
    in_steps(path, kernels=1.0, xla=2.0)
    return tmp_path


def in_steps(path, kernels, xla):
    """Whole steps with norms by kernels, and without."""
    for (job, what), ms in ((table.BY_NONE, xla), (table.BY_ALL, kernels)):
        rows = [{"step": f"{s}, {what}", "ms": ms, "high": ms} for s in table.STEPS]
        results.append(path, ABOUT | {"job": job, "rows": rows})


@pytest.mark.parametrize(("kernels", "taken"), [(1.0, True), (2.5, False)])
def test_a_norm_enters_only_by_whole_steps(tmp_path, kernels, taken):
    path = results.path_for(MACHINE, tmp_path)
    for name in ("right: rms_norm", "fast: rms_norm, bfloat16"):
        results.append(path, ABOUT | {"job": name, "rows": pair(1024, 1, 2)})
    assert table.entries(tmp_path) == []  # by itself it says nothing of fusions
    in_steps(path, kernels, xla=2.0)
    assert bool(table.entries(tmp_path)) == taken


def test_a_kernel_enters_from_the_size_on_where_it_is_no_slower(folder):
    found = table.entries(folder)
    forward = Measured("rms_norm", "h100", "bfloat16", 256, False)
    of_a_step, _ = table.STEPS["Llama-1B blocks, 2 x 2048"]
    backward = forward._replace(smallest=of_a_step, backward=True)
    assert found == [forward, backward]
    path = folder / "measured.json"
    path.write_text(table.text(found))
    assert list(measured.load(path)) == found


def test_a_kernel_that_was_not_right_does_not_enter(tmp_path):
    path = results.path_for(MACHINE, tmp_path)
    done = ABOUT | {"job": "fast: rms_norm, bfloat16", "rows": ROWS}
    results.append(path, done)
    in_steps(path, kernels=1.0, xla=2.0)
    assert table.entries(tmp_path) == []  # nobody has looked
    look = ABOUT | {"job": "right: rms_norm", "rows": [], "status": "failed"}
    results.append(path, look)
    assert table.entries(tmp_path) == []
    results.append(path, look | {"status": "done"})
    assert table.entries(tmp_path)


def test_of_a_case_that_was_stopped_the_sizes_that_have_ended_count(tmp_path):
    path = results.path_for(MACHINE, tmp_path)
    results.append(path, ABOUT | {"job": "right: rms_norm", "rows": []})
    ended = timed("kernel", 256, 1) | {"pass": "both"}
    rows = [*pair(256, 1, 2), ended, *pair(64, 1, 2)]
    case = {"job": "fast: rms_norm, bfloat16", "rows": rows, "status": "stopped"}
    results.append(path, ABOUT | case)
    in_steps(path, kernels=1.0, xla=2.0)
    found = [x.smallest for x in table.entries(tmp_path) if not x.backward]
    assert found == [256]


def test_whole_steps_count_as_a_case(tmp_path):
    path, steps = results.path_for(MACHINE, tmp_path), list(table.STEPS)
    for job in jobs.jobs().values():
        if job.name.startswith("right: attention, ") and not job.under:
            results.append(path, ABOUT | {"job": job.name, "rows": []})
    for job, what, ms in (
        ("seconds: substituted, XLA", "substitute, XLA", 3.0),
        ("seconds: substituted, our kernels", "substitute, our kernels", 2.0),
    ):
        rows = [{"step": f"{s}, {what}", "ms": ms, "high": ms} for s in steps]
        assert table.entries(tmp_path) == []
        results.append(path, ABOUT | {"job": job, "rows": rows})
    sizes = {entry.smallest for entry in table.entries(tmp_path)}
    assert sizes == {min(elements for elements, _ in table.STEPS.values())}


def test_chips_with_the_same_processors_have_the_entries_of_one(tmp_path):
    one = Measured("attention", "h200", "bfloat16", 64, True)
    (tmp_path / "measured.json").write_text(table.text([one]))
    found = measured.load(tmp_path / "measured.json")
    assert set(found) == {one._replace(chip=c) for c in ("h200", "h100", "gh200")}
    own = one._replace(chip="h100", smallest=256)  # what it has shown itself
    (tmp_path / "measured.json").write_text(table.text([one, own]))
    kept = measured.load(tmp_path / "measured.json")
    assert {x.smallest for x in kept if x.chip == "h100"} == {256}


def test_runs_in_small_do_not_enter(tmp_path):
    path = results.path_for(MACHINE, tmp_path)
    for name in ("right: rms_norm", "fast: rms_norm, bfloat16"):
        results.append(path, ABOUT | {"job": name, "rows": ROWS, "small": True})
    assert table.entries(tmp_path) == [] == table.times(tmp_path)


def test_the_largest_size_decides_first():
    assert table.smallest([*pair(64, 1, 2), *pair(256, 2, 1)]) is None
    assert table.smallest([timed("kernel", 64, 1)]) is None
    assert table.smallest([]) is None


def test_the_time_on_the_chip_decides_where_there_is_one():
    kernel, xla = pair(64, 1, 2)
    slower = [kernel | {"device ms": 0.3}, xla | {"device ms": 0.2}]
    assert table.smallest(slower) is None
    faster = [kernel | {"ms": 3, "high": 3, "device ms": 0.2}, slower[1]]
    assert table.smallest(faster) == 64


def test_every_case_of_a_kernel_counts():
    rows = pair(64, 1, 2)
    other = [timed("kernel", 64, 3, case="b"), timed("XLA", 64, 1, case="b")]
    assert table.smallest(rows) == 64
    assert table.smallest([*rows, *other]) is None


def test_the_page_has_the_times(folder):
    page = "before\n<!-- times -->\nold\n<!-- end of times -->\nafter"
    text = table.on_page(page, folder)
    assert (
        "| rms_norm | h100 | bfloat16 | forward | 256 | 1.000 | 1.200 | 0.83 |" in text
    )
    assert "old" not in text and text.endswith("after")


def test_the_list_and_the_page_are_those_of_the_results():
    assert measured.PATH.read_text() == table.text(table.entries())
    page = table.PAGE.read_text()
    assert page == table.on_page(page), "python -m benchmarks.device --table"


def test_every_kernel_is_looked_at_and_timed():
    found = jobs.jobs().values()
    right, fast = (
        {job.kernel for job in found if job.piece == piece and job.kernel}
        for piece in ("right", "fast")
    )
    assert right == fast


# -- what the library reads


ENTRY = {"kernel": "a", "chip": "h100", "dtype": "f", "smallest": 1, "backward": True}


@pytest.mark.parametrize(
    "rows, message",
    [
        ({}, "a list of entries"),
        ([{"kernel": "a"}], "entry 0: an object of kernel, chip, dtype"),
        ([ENTRY, ENTRY | {"chip": "h1000"}], "entry 1: chip='h1000' is none that"),
        ([ENTRY | {"smallest": True}], "smallest=True is no int"),
        ([ENTRY | {"smallest": -1}], "smallest=-1 is negative"),
        ([ENTRY | {"backward": 1}], "backward=1 is no bool"),
    ],
)
def test_a_bad_entry_is_named(rows, message, tmp_path):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=message):
        measured.load(path)


def test_a_file_that_is_no_json_is_named(tmp_path):
    (tmp_path / "measured.json").write_text("[")
    with pytest.raises(ValueError, match="measured.json: no JSON"):
        measured.load(tmp_path / "measured.json")
