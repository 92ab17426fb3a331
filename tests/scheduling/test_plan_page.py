"""A plan as a page: what was done, and memory before and after."""

import dataclasses

import pytest
from matplotlib import rc_context

from jaxmem._bytes import format_bytes
from jaxmem.scheduling import Plan
from jaxmem.scheduling.plan.rows import Gradient
from tests.memory import dumps


@pytest.fixture(scope="module")
def plan():
    gradient = Gradient(4096, (4, 256), "float32", "Net/<layers>", True)
    return Plan(
        (gradient,),
        (),
        plain=dumps.report(dumps.bert_result(scan=False), name="train"),
        scheduled=dumps.report(dumps.bert_result(), name="train"),
        target="cpu",
        notes=("a note",),
    )


@pytest.mark.slow
def test_a_page_shows_the_rows_and_both_pictures(plan, tmp_path):
    plan.save(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert "released: 4.00 KiB of gradients, 1 array" in text
    assert "Net/&lt;layers&gt;" in text and "a note" in text
    assert text.count('class="jm-chart"') == 2
    assert "before: train: peak" in text and "after: train: peak" in text
    assert 'class="jm-chart"' in plan._repr_html_()


def test_pictures_mark_the_budget(plan, tmp_path):
    """In both; a budget that is far above is no part of the picture."""
    near, far = plan.scheduled.peak_bytes, 10 * plan.plain.peak_bytes
    marked = f"budget: {format_bytes(near)}"
    assert dataclasses.replace(plan, budget=near)._repr_html_().count(marked) == 2
    assert "budget: " not in dataclasses.replace(plan, budget=far)._repr_html_()
    with rc_context({"svg.fonttype": "none"}):
        dataclasses.replace(plan, budget=near).plot(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text().count(marked) == 2


def test_a_plan_that_compiled_nothing_has_a_page(plan, tmp_path):
    bare = dataclasses.replace(plan, plain=None, scheduled=None, target="")
    text = bare._repr_html_()
    assert "Net/&lt;layers&gt;" in text and "<figure" not in text
    with pytest.raises(ValueError, match="nothing to draw"):
        bare.save(tmp_path / "plan.svg")


def test_a_plan_is_written_and_read(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert Plan.from_json((tmp_path / "plan.json").read_text()) == plan
    plan.save(tmp_path / "plan.txt")
    assert (tmp_path / "plan.txt").read_text() == f"{plan}\n"
