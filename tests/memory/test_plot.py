"""The picture: what it stacks adds up, and it is written."""

import dataclasses
import struct
import sys

import pytest

from jaxmem.memory.report.plot import layers_of
from tests.memory import dumps
from tests.sets import some_fast


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
