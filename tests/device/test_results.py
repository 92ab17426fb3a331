"""Lines are added, and read so that nothing is lost."""

from benchmarks.device import results

MACHINE = {"chip": "h100", "driver": "570.1 (a)", "jax": "0.10.2"}


def line(status, n, job="a"):
    rows = [{"n": n}] * n
    return {"job": job, "status": status, "rows": rows, "machine": MACHINE}


def read(tmp_path, *lines):
    path = results.path_for(MACHINE, tmp_path)
    for record in lines:
        results.append(path, record)
    return results.read(path)["a"]


def test_files_are_named_by_chip_driver_and_version(tmp_path):
    name = results.path_for(MACHINE, tmp_path).name
    assert name == "device-h100-driver570.1_a_-jax0.10.2.jsonl"


def test_a_failure_never_replaces_a_success(tmp_path):
    assert read(tmp_path, line("done", 1), line("crashed", 3))["rows"] == [{"n": 1}]


def test_a_success_replaces_what_was_there(tmp_path):
    found = read(tmp_path, line("crashed", 3), line("done", 1), line("done", 2))
    assert found["status"] == "done" and len(found["rows"]) == 2


def test_a_failure_does_not_erase_the_rows_of_another(tmp_path):
    assert len(read(tmp_path, line("stopped", 2), line("failed", 0))["rows"]) == 2
    assert read(tmp_path, line("timed out", 2))["status"] == "timed out"


def test_a_line_that_was_cut_in_two_spoils_itself_alone(tmp_path):
    path = results.path_for(MACHINE, tmp_path)
    results.append(path, line("done", 1))
    with path.open("a") as file:
        file.write('{"job": "b", "sta')
    results.append(path, line("done", 1, "c"))
    assert list(results.read(path)) == ["a", "c"]
    assert [len(seen) for _, seen in results.every(tmp_path)] == [2]
