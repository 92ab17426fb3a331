"""Buffers as CSV, and the command that lays them out."""

import re

import pytest
from typer.testing import CliRunner

from benchmarks.layout import guillotine
from jaxmem.cli import app
from jaxmem.planning import Buffer, Gap, read_buffers, write_buffers

SMALL = "id,lower,upper,size\n0,0,3,4\nb1,2,5,6\n2,3,9,4\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.csv"
    path.write_text(SMALL)
    return path


def invoke(*args):
    return CliRunner().invoke(app, ["layout", *map(str, args)])


def refused(path, message, said):
    """Reading it is a ValueError; the command exits with 2 and says it, too."""
    with pytest.raises(ValueError, match=message):
        read_buffers(path)
    result = invoke(path)
    assert result.exit_code == 2
    # the box of an error message breaks long paths over lines
    assert said in re.sub(r"[\s│]", "", result.output)


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
        (f"id,lower,upper,size\n0,0,{2**63},4\n", "line 2: upper .* got '92233720"),
        (f"id,lower,upper,size\n0,{-(2**63) - 1},1,4\n", "line 2: lower must be a w"),
        (f"id,lower,end,size\n0,0,{2**63 - 1},4\n", "line 2: buffer 0: upper=92233"),
        (f"id,lower,upper,size\n0,0,1,{'9' * 5000}\n", r"size .* got '9{40}\.\.\.'"),
        (f"id,lower,upper,size\n0,0,1,{2**61}\n", "line 2: size must be a whole"),
        ("id,lower,upper,size\n,0,1,4\n", "line 2: id must not be empty"),
        ("id,lower,upper,size\n  ,0,1,4\n", "line 2: id must not be empty"),
        ("id,lower,upper,size,size\n0,0,1,4,5\n", "line 1: two columns 'size'"),
        ("id,start,lower,upper,size\n0,0,1,4,5\n", "line 1: two columns 'lower'"),
        ("id,lower,upper,size\n0,0,1,4,5\n", "line 2: too many columns: 5"),
        ("id,lower,upper,size,alignment\n0,0,1,4,0\n", "line 2: alignment .* got '0'"),
        ("id,lower,upper,size,gaps\n0,0,9,4,3:5\n", "line 2: gaps must be lower-upp"),
        ("id,lower,upper,size,gaps\n0,0,9,4,3-11\n", "line 2: .* must lie within"),
        ('id,lower,upper,size\n"0,0,1,4\n', "line 2: unexpected end of data"),
    ],
)
def test_bad_files_name_the_line(tmp_path, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    refused(path, message, "bad.csv")


def test_a_file_that_is_not_utf_8_is_named(tmp_path):
    path = tmp_path / "latin.csv"
    path.write_bytes("id,lower,upper,size\nä,0,1,4\n".encode("latin-1"))
    message = r"latin\.csv, line 2: the file must be UTF-8; byte 20 is 0xe4"
    refused(path, message, "mustbeUTF-8")


def test_alignments_and_gaps_are_read_and_written(tmp_path):
    path = tmp_path / "gaps.csv"
    path.write_text(
        "id,lower,upper,size,alignment,gaps\na,-3,20,64,32,-1-2 7-9@0:16\nb,0,5,8,,\n"
    )
    buffers = read_buffers(path)
    assert buffers == (
        Buffer("a", -3, 20, 64, 32, (Gap(-1, 2), Gap(7, 9, (0, 16)))),
        Buffer("b", 0, 5, 8),
    )
    write_buffers(tmp_path / "written.csv", buffers)
    assert read_buffers(tmp_path / "written.csv") == buffers


def test_the_last_moment_of_a_gap_counts_where_that_of_a_life_does(tmp_path):
    """minimalloc's older names: an end is the last time at which it is there."""
    path = tmp_path / "older.csv"
    path.write_text("buffer,start,end,size,gaps\n0,0,9,4,2-4\n")
    assert read_buffers(path) == (Buffer(0, 0, 10, 4, gaps=(Gap(2, 5),)),)


@pytest.mark.parametrize(
    "ids, message",
    [
        (["", "a"], "must not be empty"),
        ([" a", "b"], "nor begin or end with a blank"),
        ([7, "7"], "two have the id '7' in a CSV"),
    ],
)
def test_ids_that_a_file_would_not_keep_are_not_written(tmp_path, ids, message):
    path = tmp_path / "ids.csv"
    with pytest.raises(ValueError, match=message):
        write_buffers(path, [Buffer(name, 0, 1, 1) for name in ids])
    assert not path.exists()


def test_the_limits_of_time_are_read_and_laid_out(tmp_path):
    path = tmp_path / "wide.csv"
    buffers = Buffer(0, -(2**63), 2**63 - 1, 4), Buffer(1, 0, 1, 2**60)
    write_buffers(path, buffers)
    assert read_buffers(path) == buffers
    assert invoke(path).exit_code == 0


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
