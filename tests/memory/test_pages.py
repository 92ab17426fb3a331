"""Files of results: what each suffix writes, and pages that are whole and escaped."""

import dataclasses
import html.parser
import json
import re

import jax.numpy as jnp
import pytest

from jaxmem.linting import LintReport
from jaxmem.memory import residuals
from jaxmem.memory.buffers.rows import PlacedBuffer
from jaxmem.nn import KeptArrays, RemainingArrays, Replacement, SubstitutionReport
from jaxmem.optim.ledgers import Ledger, LedgerRow
from jaxmem.pages.markup import Markup, data, tag
from tests.memory import dumps

STRANGE = "<script>alert('&')</script>"


@pytest.fixture(scope="module")
def bert():
    return dumps.report(dumps.bert_result(scan=False), name="loss")


def strangely_named(report):
    """The report with a name that is HTML wherever a name may be."""
    fields = {"name": STRANGE, "module_path": STRANGE, "source": STRANGE}
    peak = [dataclasses.replace(b, **fields) for b in report.at_peak]
    fields = {"name": STRANGE, "module": STRANGE, "source": STRANGE, "what": STRANGE}
    placed = [dataclasses.replace(p, **fields) for p in report.placed]
    steps = [
        dataclasses.replace(s, label=STRANGE, by_module=((STRANGE, s.bytes),))
        for s in report.timeline
    ]
    return dataclasses.replace(
        report,
        name=STRANGE,
        target=STRANGE,
        at_peak=tuple(peak),
        placed=tuple(placed),
        timeline=tuple(steps),
        notes=(STRANGE,),
        advice=(STRANGE,),
    )


def results(report):
    kept = residuals(lambda x: jnp.sum(jnp.sin(x)), jnp.ones((8, 4)))
    kept = type(kept)(
        tuple(dataclasses.replace(e, operation=STRANGE, path=STRANGE) for e in kept)
    )
    row = LedgerRow("weights", STRANGE, ("float32",), 4, 0)
    yield report
    yield report.compare(report)
    yield report.runtime()
    yield kept
    yield kept.compare(kept)
    yield LintReport(STRANGE, (), (STRANGE,))
    yield Ledger(1, (row,))
    left = RemainingArrays(4, "f32[1]", STRANGE, STRANGE, STRANGE)
    entry = Replacement(STRANGE, STRANGE, None, STRANGE)
    strange = (STRANGE,)
    yield SubstitutionReport(
        (entry,), strange, strange, strange, False, strange, KeptArrays(4, (left,))
    )


class Elements(html.parser.HTMLParser):
    """The elements of a page; each that is opened is closed."""

    void = {"meta"}

    def __init__(self, text):
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_no_name_is_ever_html(bert, tmp_path):
    plain, strange = list(results(bert)), list(results(strangely_named(bert)))
    for ordinary, result in zip(plain, strange, strict=True):
        result.save(tmp_path / "a.html")
        page = (tmp_path / "a.html").read_text()
        found = Elements(page)
        assert "<script>alert" not in page and "alert('&')" in found.text
        scripts = 1 + len(re.findall(r'<script type="application/json">', page))
        assert found.count["script"] == scripts
        assert Elements(result._repr_html_()).count["script"] == scripts
        ordinary.save(tmp_path / "b.html")
        Elements((tmp_path / "b.html").read_text())


def test_a_page_asks_for_nothing_from_a_network(bert, tmp_path):
    bert.save(tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert not re.findall(r"https?:|src=|@import|url\(", page)
    assert "default-src 'none'" in page
    assert page.startswith("<!doctype html>") and "<title>loss: peak" in page


def test_the_size_of_a_page_is_bounded(bert):
    """A thousand buffers are placed; a step may have many more."""
    line = PlacedBuffer(
        2**20, 0, 0, 9, "f32[512,512]", "dot", "A/b", "model.py:1", "f.1"
    )
    many = tuple(
        dataclasses.replace(line, offset=i, start=i, end=i + 9, name=f"fusion.{i}")
        for i in range(1000)
    )
    assert len(dataclasses.replace(bert, placed=many)._repr_html_()) < 600_000
    assert len(bert.placed) < 1000


def test_placed_buffers_are_the_temporaries(bert):
    """Each is within them, and those alive at the peak fill them but for small ones."""
    assert all(p.offset + p.bytes <= bert.temp_bytes for p in bert.placed)
    assert [p.start for p in bert.placed] == sorted(p.start for p in bert.placed)
    alive = [p for p in bert.placed if p.start <= bert.peak_step <= p.end]
    covered = set()
    for p in alive:
        covered |= set(range(p.offset, p.offset + p.bytes, 64))
    shown = sum(b.bytes for b in bert.at_peak if b.kind == "temp" and b.array)
    assert 0.95 * shown <= 64 * len(covered) <= 1.05 * shown


def test_each_suffix_has_its_form(bert, tmp_path):
    for suffix, start in (
        ("html", "<!doctype html>"),
        ("txt", "loss: peak"),
        ("json", "{"),
    ):
        bert.save(tmp_path / f"a.{suffix}")
        assert (tmp_path / f"a.{suffix}").read_text().startswith(start)
    text = (tmp_path / "a.json").read_text()
    assert type(bert).from_json(text) == bert
    bert.save(str(tmp_path / "a.SVG"))
    assert "<svg" in (tmp_path / "a.SVG").read_text()


@pytest.mark.parametrize("name", ["a", "a.htm", "a.html.gz", "a.jpg"])
def test_other_suffixes_are_refused(bert, tmp_path, name):
    with pytest.raises(ValueError, match=r"path=.*\.html, \.txt, \.json, \.png, \.svg"):
        bert.save(tmp_path / name)
    lint = LintReport("step", ())
    with pytest.raises(ValueError, match=r"ends in \.html, \.txt or \.json"):
        lint.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_json_of_earlier_versions_is_read(bert):
    plain = json.loads(bert.to_json())
    del plain["placed"]
    read = type(bert).from_json(json.dumps(plain))
    assert read == dataclasses.replace(bert, placed=())
    assert 'data-view="address"' not in read._repr_html_()  # one view, no buttons


def test_markup():
    assert tag("b", "<", Markup("<i>")) == "<b>&lt;<i></b>"
    assert tag("a", title='"<', hidden=None) == '<a title="&quot;&lt;"></a>'
    assert "</script>x" not in data("</script>x")[:-9]
