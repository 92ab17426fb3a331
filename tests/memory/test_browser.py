"""Saved pages in a real browser: hover, filter, both widths, no error."""

import dataclasses
import json

import pytest

from jaxmem._bytes import format_bytes
from jaxmem.linting import LintReport
from tests.browser import hover, opened, overflow, show
from tests.memory import dumps
from tests.memory.test_pages import results, strangely_named

CHIP = type("Chip", (), {"name": "chip", "memory_bytes": 4 * 2**20})


@pytest.fixture(scope="module")
def bert():
    return dumps.report(dumps.bert_result(scan=False), target=CHIP, name="loss")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("browser")) as found:
        yield found


def shapes(browser, view="address"):
    return browser.find_elements("css selector", f'svg[data-view="{view}"] [data-m]')


def opaque(browser):
    """Whether each shape of the first view is shown in full."""
    return browser.execute_script(
        "return [...document.querySelectorAll('svg[data-view=address] [data-m]')]"
        ".map((each) => getComputedStyle(each).opacity === '1')"
    )


def test_a_buffer_tells_what_it_is(bert, tmp_path, browser):
    bert.save(tmp_path / "a.html")
    show(browser, tmp_path / "a.html")
    largest = max(bert.placed, key=lambda p: (p.bytes * (p.end - p.start), p.offset))
    text = hover(browser, shapes(browser)[_number(browser, largest)])
    for part in (
        largest.what,
        largest.array,
        format_bytes(largest.bytes),
        largest.module,
        "dumps.py:",
        f"alive from step {largest.start} to {largest.end}",
    ):
        assert part in text
    assert overflow(browser) <= 0
    legend = browser.find_elements("css selector", ".jm-legend button")
    chosen = next(b for b in legend if b.text == largest.module)
    chosen.click()
    number = chosen.get_attribute("data-m")
    of_module = browser.execute_script(
        "return [...document.querySelectorAll('svg[data-view=address] [data-m]')]"
        ".map((each) => each.dataset.m === arguments[0])",
        number,
    )
    assert opaque(browser) == of_module and not all(of_module) and any(of_module)
    chosen.click()
    assert all(opaque(browser))
    assert browser.get_log("browser") == []


def _number(browser, placed):
    """The rectangle of a buffer: its tooltip's data has XLA's name of it."""
    script = "return document.querySelector('.jm-chart script').textContent"
    known = json.loads(browser.execute_script(script))
    names = [[known["strings"][i] for i in lines] for lines in known["buffers"]]
    lifetime = f"alive from step {placed.start} to {placed.end} of {known['across']}"
    return next(
        i for i, x in enumerate(names) if x[-1] == placed.name and lifetime in x
    )


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 420])
def test_every_page_fits_both_widths(bert, tmp_path, browser, width, dark):
    long = dataclasses.replace(bert, name="a_step_with_" + 20 * "a_long_" + "name")
    for report in (bert, long, strangely_named(bert)):
        for i, result in enumerate(results(report)):
            path = tmp_path / f"{i}.html"
            result.save(path)
            show(browser, path, width, dark)
            assert overflow(browser) <= 0, (type(result).__name__, width)
            body = browser.find_element("css selector", ".jm-headline")
            ink = browser.execute_script(
                "const of = (e) => getComputedStyle(e).color.match(/\\d+/g).slice(0, 3)"
                ".reduce((a, b) => a + Number(b), 0);"
                "const at = getComputedStyle(document.querySelector('.jm'))"
                ".backgroundColor.match(/\\d+/g).slice(0, 3)"
                ".reduce((a, b) => a + Number(b), 0);"
                "return [of(arguments[0]), at]",
                body,
            )
            assert abs(ink[0] - ink[1]) > 200  # of 765: text stands out in both
            assert (ink[1] < 200) == dark


@pytest.mark.slow
def test_both_views_and_a_comparison(bert, tmp_path, browser):
    other = dumps.report(dumps.bert_result(), target=CHIP, name="loop")
    bert.compare(other).save(tmp_path / "c.html")
    show(browser, tmp_path / "c.html")
    charts = browser.find_elements("css selector", ".jm-chart")
    assert len(charts) == 2
    boxes = [chart.rect for chart in charts]
    assert boxes[0]["y"] == boxes[1]["y"]  # beside each other
    browser.find_element("css selector", 'button[data-view="module"]').click()
    assert not any(s.is_displayed() for s in shapes(browser)[:3])
    areas = charts[1].find_elements("css selector", 'svg[data-view="module"] [data-m]')
    assert areas[0].is_displayed()
    text = hover(browser, areas[0])
    arguments = f"{format_bytes(other.argument_bytes)} of "
    assert text.startswith("(arguments)") and arguments in text and "step " in text
    peak = charts[1].find_element("css selector", ".jm-peak")
    assert format_bytes(other.peak_bytes) in peak.text
    show(browser, tmp_path / "c.html", 420)
    boxes = [c.rect for c in browser.find_elements("css selector", ".jm-chart")]
    assert boxes[0]["x"] == boxes[1]["x"]  # below each other


@pytest.mark.slow
def test_the_tooltip_stays_within_a_narrow_page(bert, tmp_path, browser):
    bert.save(tmp_path / "a.html")
    show(browser, tmp_path / "a.html", 420)
    seen = 0
    for shape in shapes(browser)[:: max(len(bert.placed) // 40, 1)]:
        if hover(browser, shape):
            tip = browser.find_element("css selector", ".jm-tip").rect
            assert tip["x"] >= 0 and tip["x"] + tip["width"] <= 420
            seen += 1
    assert seen > 10 and overflow(browser) <= 0


@pytest.mark.slow
def test_two_results_on_one_page(bert, tmp_path, browser):
    """A notebook has many results on a page: each has its own buttons."""
    pieces = bert._repr_html_(), bert._repr_html_(), LintReport("s", ())._repr_html_()
    text = f"<!doctype html><meta charset=utf-8><body>{''.join(pieces)}</body>"
    (tmp_path / "a.html").write_text(text)
    show(browser, tmp_path / "a.html")
    first, second, _ = browser.find_elements("css selector", ".jm")
    first.find_element("css selector", ".jm-legend button").click()
    assert first.find_elements("css selector", ".jm-dim")
    assert not second.find_elements("css selector", ".jm-dim")
