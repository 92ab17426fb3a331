"""The picture: what it stacks adds up, and it is written."""

import dataclasses
import struct
import sys

import pytest

from jaxmem.memory.report.plot import layers_of
from tests.memory import dumps
from tests.sets import some_fast


@pytest.mark.fast("stack_result")
@pytest.mark.parametrize("result", [dumps.stack_result, dumps.bert_result])
def test_layers_add_up_to_the_live_bytes(result):
    report = dumps.report(result())
    layers = layers_of(report)
    totals = [sum(column) for column in zip(*layers.values(), strict=True)]
    assert totals == [step.bytes for step in report.timeline]


def test_layers_are_few_and_large():
    report = dumps.report(dumps.bert_result())
    layers = layers_of(report)
    assert 4 <= len(layers) <= 13
    assert "Bert/layers/attention" in layers and "(arguments)" in layers


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are written while a test runs."""
    figure = pytest.importorskip("matplotlib.figure")
    found = []
    save = figure.Figure.savefig

    def savefig(self, path, **options):
        found.append(self)
        save(self, path, **options)

    monkeypatch.setattr(figure.Figure, "savefig", savefig)
    return found


@pytest.mark.slow
def test_two_pictures_and_a_legend_that_covers_nothing(drawn, tmp_path):
    """One legend, outside of both pictures, with one colour a module."""
    before = dumps.report(dumps.bert_result(scan=False), name="train")
    after = dumps.report(dumps.bert_result(), name="train")
    before.compare(after).save(tmp_path / "a.png")
    (figure,) = drawn
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert not any(axes.get_legend() for axes in figure.axes)
    for axes in figure.axes:
        assert not box.overlaps(axes.get_window_extent())
    assert figure.bbox.x1 >= box.x1 and figure.bbox.y0 <= box.y0
    labels = [text.get_text() for text in legend.get_texts()]
    assert len(labels) == len(set(labels)) <= 13
    colours = [patch.get_facecolor() for patch in legend.get_patches()]
    assert len(set(colours)) == len(colours)
    for axes, when in zip(figure.axes, ("before", "after"), strict=True):
        assert axes.get_title(loc="left").startswith(f"train on cpu, {when}: peak ")
    assert figure.axes[0].get_ylabel() == "MiB"


@pytest.mark.parametrize("suffix", some_fast(["png", "svg"], "png"))
def test_writes_a_picture(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"bytes.{suffix}"
    dumps.report(dumps.bert_result(), name="train").plot(path)
    data = path.read_bytes()
    if suffix == "png":
        width, height = struct.unpack(">II", data[16:24])
        assert data.startswith(b"\x89PNG") and width > height > 500
    else:
        text = data.decode()
        assert "<svg" in text


def test_needs_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="-m pip install 'matplotlib>=3.9'"):
        dumps.report(dumps.stack_result()).plot(tmp_path / "a.png")


def test_nothing_to_draw(tmp_path):
    report = dataclasses.replace(dumps.report(dumps.stack_result()), timeline=())
    with pytest.raises(ValueError, match="no schedule"):
        report.plot(tmp_path / "a.png")
