"""Two results side by side: the differences add up, and carry their signs."""

import dataclasses
import io
import json
import re

import jax
import jax.numpy as jnp
import pytest
import rich.console

from jaxmem.memory import residuals
from jaxmem.memory.report.compare import ComparedRow, compared
from jaxmem.memory.report.plot import colours_of_reports
from tests.memory import dumps


@pytest.fixture(scope="module")
def both():
    """The same model with its layers written out, and in a loop."""
    before = dumps.report(dumps.bert_result(scan=False), name="written_out")
    return before, dumps.report(dumps.bert_result(), name="loop")


def test_differences_add_up(both):
    before, after = both
    found = before.compare(after)
    totals = {row.name: row for row in found.sections["totals"]}
    assert totals["peak"].difference == after.peak_bytes - before.peak_bytes
    for title in ("at the peak, by module", "at the peak, by kind"):
        rows = found.sections[title]
        assert sum(row.before for row in rows) == before.peak_bytes
        assert sum(row.after for row in rows) == after.peak_bytes
        changes = [abs(row.difference) for row in rows]
        assert changes == sorted(changes, reverse=True)


def test_text_rich_and_json_say_the_same(both):
    before, after = both
    found = before.compare(after)
    text = str(found)
    assert text.startswith("before: written_out: peak ")
    assert "after:  loop: peak " in text
    file = io.StringIO()
    rich.console.Console(file=file, width=160).print(found)
    row = next(r for r in found.sections["totals"] if r.name == "peak")
    for cell in row.cells():
        assert cell in text and cell in file.getvalue() and cell in found._repr_html_()
    plain = json.loads(found.to_json())
    assert plain["sections"]["totals"][0] == dataclasses.asdict(row)


@pytest.mark.parametrize(
    ("before", "after", "cells"),
    [
        (100, 50, ("100 B", "50 B", "-50 B", "-50.0 %")),
        (100, 125, ("100 B", "125 B", "+25 B", "+25.0 %")),
        (0, 3, ("0 B", "3 B", "+3 B", "new")),
        (7, 7, ("7 B", "7 B", "0 B", "")),
    ],
)
def test_signs(before, after, cells):
    assert ComparedRow("x", before, after).cells() == ("x", *cells)


def test_rows_of_both_sides():
    rows = compared({"a": 1, "b": 5}, {"b": 5, "c": 9})
    assert rows == (
        ComparedRow("c", 0, 9),
        ComparedRow("a", 1, 0),
        ComparedRow("b", 5, 5),
    )


def test_a_module_has_one_colour_in_both_pictures(both):
    colours = colours_of_reports(both)
    assert colours_of_reports(both[::-1]) == colours
    page = both[0].compare(both[1])._repr_html_()
    shapes = re.findall(r'<(?:rect|polygon) [^>]*fill="([^"]*)" data-m="(\d+)"', page)
    assert len(shapes) > 100
    for fill, number in shapes:
        assert fill == list(colours.values())[int(number)]


def test_the_picture(both, tmp_path):
    both[0].compare(both[1]).save(tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_residuals():
    def loss(w, x):
        with jax.named_scope("layer"):
            return jnp.sum(jnp.sin(x @ w))

    args = jnp.ones((16, 4)), jnp.ones((8, 16))
    before, after = residuals(loss, *args), residuals(jax.checkpoint(loss), *args)
    found = before.compare(after)
    (row,) = found.sections["kept, by module"]
    assert row == ComparedRow("layer", before.total_bytes, 0)
    assert found.sections["totals"][0].after == after.total_bytes == 0
    with pytest.raises(ValueError, match="only reports of `estimate` are drawn"):
        found.plot("a.png")


def test_of_one_kind_only(both):
    kept = residuals(jnp.sin, jnp.ones((3,)))
    with pytest.raises(TypeError, match="other=.*a MemoryReport"):
        both[0].compare(kept)
    with pytest.raises(TypeError, match="other=3"):
        kept.compare(3)
