"""Buffers as CSV, and the command that lays them out."""

import re

import pytest
from typer.testing import CliRunner

from benchmarks.layout import guillotine
from jaxmem.cli import app
from jaxmem.planning import Buffer, read_buffers, write_buffers

SMALL = "id,lower,upper,size\n0,0,3,4\nb1,2,5,6\n2,3,9,4\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.csv"
    path.write_text(SMALL)
    return path


def invoke(*args):
    return CliRunner().invoke(app, ["layout", *map(str, args)])


def test_buffers_are_read(file):
    expected = (Buffer(0, 0, 3, 4), Buffer("b1", 2, 5, 6), Buffer(2, 3, 9, 4))
    assert read_buffers(file) == expected


def test_what_is_written_is_read_again(file, tmp_path):
    buffers = read_buffers(file)
    write_buffers(tmp_path / "plain.csv", buffers)
    assert (tmp_path / "plain.csv").read_text() == SMALL
    write_buffers(tmp_path / "placed.csv", buffers, {0: 0, "b1": 4, 2: 0})
    assert (tmp_path / "placed.csv").read_text().splitlines() == [
        "id,lower,upper,size,offset",
        "0,0,3,4,0",
        "b1,2,5,6,4",
        "2,3,9,4,0",
    ]
    assert read_buffers(tmp_path / "placed.csv") == buffers


def test_columns_may_come_in_any_order(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("\ufeffSize, upper, lower, id\n\n4, 3, 0, 07\n")
    assert read_buffers(path) == (Buffer("07", 0, 3, 4),)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "line 1: no column 'id'"),
        ("id,lower,upper\n", "line 1: no column 'size'"),
        ("id,lower,upper,size\n0,0,1,4\n1,0,x,4\n", "line 3: upper .* got 'x'"),
        ("id,lower,upper,size\n0,0,1\n", "line 2: too few columns"),
        ("id,lower,upper,size\n0,0,1,1.5\n", "line 2: size .* got '1.5'"),
        ("id,lower,upper,size\n0,3,3,4\n", "line 2: .* lower must be below upper"),
        ("id,lower,upper,size\n0,0,1,-4\n", "line 2: .* negative: -4"),
        ("id,lower,upper,size\n0,0,1,4\n\n0,2,3,4\n", "line 4: .* was on line 2"),
    ],
)
def test_bad_files_name_the_line(tmp_path, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_buffers(path)
    result = invoke(path)
    assert result.exit_code == 2
    # the box of an error message breaks long paths over lines
    assert "bad.csv" in re.sub(r"[\s│]", "", result.output)


def test_command_lays_out(file, tmp_path):
    placed, picture = tmp_path / "placed.csv", tmp_path / "picture.png"
    options = ("--capacity", "10B", "--output", placed, "--plot", picture)
    result = invoke(file, *options)
    assert result.exit_code == 0, result.output
    assert "10 bytes" in result.output
    rows = [line.split(",") for line in placed.read_text().splitlines()[1:]]
    assert max(int(row[3]) + int(row[4]) for row in rows) == 10
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_command_without_capacity_finds_the_least(file):
    result = invoke(file)
    assert result.exit_code == 0, result.output
    assert "optimal" in result.output


def test_command_refuses_too_little(file):
    result = invoke(file, "--capacity", 9)
    assert result.exit_code == 2
    assert "10 bytes that are alive" in " ".join(result.output.split())
    assert invoke(file, "--capacity", "many").exit_code == 2
    assert invoke(file.with_name("none.csv")).exit_code == 2


def test_command_says_that_nothing_fits(tmp_path):
    path, placed = tmp_path / "hard.csv", tmp_path / "placed.csv"
    write_buffers(path, guillotine(150, 100, 1000, seed=0))
    result = invoke(path, "--capacity", 1000, "--time-limit", 0, "--output", placed)
    assert result.exit_code == 1
    assert "the lowest found takes" in " ".join(result.output.split())
    assert placed.exists()
