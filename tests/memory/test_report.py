"""The report: rows add up, names are the user's, text and JSON say it all."""

import dataclasses
import html.parser
import inspect
import io
import json
import pickle
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._bytes import format_bytes, parse_bytes
from jaxmem.memory.buffers.rows import FRAGMENTATION
from jaxmem.memory.report.donation import copied_parameters
from jaxmem.memory.report.report import MemoryReport
from tests.memory import dumps
from tests.sets import some_fast

NAMES = ["weights", "x"]
CHIP = SimpleNamespace(name="chip", memory_bytes=2**20)


@pytest.fixture(scope="module")
def stack():
    return dumps.report(dumps.stack_result(), argument_names=NAMES)


@pytest.fixture(scope="module")
def bert():
    return dumps.report(dumps.bert_result())


def totals(report):
    found = dict.fromkeys(("argument", "output", "temp"), 0)
    for holder in report.at_peak:
        found[holder.kind] += holder.bytes
    return found


@pytest.mark.parametrize("result", [dumps.stack_result, dumps.bert_result])
def test_rows_add_up(result):
    report = dumps.report(result())
    assert totals(report) == {
        "argument": report.argument_bytes,
        "output": report.output_bytes - report.alias_bytes,
        "temp": report.temp_bytes,
    }
    assert sum(totals(report).values()) == report.peak_bytes
    assert all(h.bytes > 0 for h in report.at_peak)


def test_the_timeline_peaks_at_the_peak_but_for_fragmentation(stack):
    holes = sum(h.bytes for h in stack.at_peak if h.operation == FRAGMENTATION)
    fullest = max(stack.timeline, key=lambda step: step.bytes)
    at_peak = next(s for s in stack.timeline if s.index == stack.peak_step)
    assert fullest.bytes == at_peak.bytes == stack.peak_bytes - holes
    for step in stack.timeline:
        assert step.bytes == sum(n for _, n in step.by_module)


def test_large_buffers_have_rows_and_names(stack):
    residual = next(h for h in stack.at_peak if h.shape == (5, 64, 32))
    lines, first = inspect.getsourcelines(dumps.stack_loss)
    line = first + next(i for i, text in enumerate(lines) if "jnp.tanh" in text)
    assert (residual.kind, residual.dtype) == ("temp", "float32")
    assert residual.module_path == "stack/layer"
    assert residual.source.endswith("dumps.py:" + str(line))
    assert residual.array == "f32[5,64,32]"


def test_arguments_have_their_names(stack):
    arguments = {h.name: h.bytes for h in stack.at_peak if h.kind == "argument"}
    assert arguments == {"weights (donated)": 5 * 32 * 32 * 4, "x": 64 * 32 * 4}


def test_without_names_the_traced_ones(bert):
    names = {h.name for h in bert.at_peak if h.kind == "argument"}
    assert "p['params']['layers']['mlp']['up']['kernel']" in names


def test_outputs_that_are_not_donated(bert):
    outputs = [h for h in bert.at_peak if h.kind == "output" and h.name]
    kernel = next(h for h in outputs if h.shape == (5, 32, 128))
    assert kernel.module_path == "Bert/layers/mlp/up" and kernel.backward


def test_flax_modules_are_named(bert):
    groups = {h.group for h in bert.at_peak}
    assert {"Bert/layers/attention", "Bert/layers/mlp"} <= groups
    scores = [h for h in bert.at_peak if h.shape == (5, 2, 4, 64, 64)]
    assert scores and {h.module_path for h in scores} == {"Bert/layers/attention"}


def test_layers_written_out_are_one_group():
    report = dumps.report(dumps.bert_result(scan=False))
    assert "  5 x Bert/layers_*/attention\n" in str(report)
    assert "5 x f32[32,128] " in str(report)  # kernels, whose names have the number
    assert "layers_*']['mlp']['up']" in str(report)
    assert "Bert/layers_3/attention" in {h.group for h in report.at_peak}
    modules = {m for step in report.timeline for m, _ in step.by_module}
    assert "Bert/layers_*/attention" in modules


def test_text(stack):
    text = str(dataclasses.replace(stack, memory_bytes=2**20, notes=("a note",)))
    first, second, *_ = text.splitlines()
    peak, left = format_bytes(stack.peak_bytes), 2**20 - stack.peak_bytes
    result = f"fits ({format_bytes(left)} to spare)"
    assert first == f"step: peak {peak} of 1.00 MiB on cpu: {result}"
    assert "arguments" in second and "aliased with donated inputs 20.0 KiB" in second
    for part in ("stack/layer", "f32[5,64,32]", "dumps.py:", "weights", "a note"):
        assert part in text


def test_text_says_when_it_does_not_fit(stack):
    report = dataclasses.replace(stack, target="chip", memory_bytes=1024)
    first = str(report).splitlines()[0]
    assert "of 1.00 KiB on chip: does NOT fit (" in first and "too much)" in first


def test_fits():
    report = dumps.report(dumps.stack_result(), target=CHIP)
    assert report.fits() and report.fits(report.peak_bytes) and report.fits("1 GiB")
    assert not report.fits(report.peak_bytes - 1) and not report.fits("1kB")


def test_fits_needs_a_memory(stack):
    with pytest.raises(ValueError, match="'cpu' has no memory"):
        stack.fits()
    with pytest.raises(ValueError, match="memory='14 bananas': bytes"):
        stack.fits("14 bananas")


def test_json_and_pickle_round_trip(bert):
    assert MemoryReport.from_json(bert.to_json()) == bert
    assert MemoryReport.from_json(bert.to_json(indent=1)) == bert
    assert pickle.loads(pickle.dumps(bert)) == bert
    assert len(bert.to_json()) < 1_000_000
    assert json.loads(bert.to_json())["peak_bytes"] == bert.peak_bytes


@pytest.mark.parametrize("text", ['{"a": 1}', "[]", "not json"])
def test_other_json_is_refused(text):
    with pytest.raises(ValueError):
        MemoryReport.from_json(text)


def test_rich(bert):
    console = pytest.importorskip("rich.console")
    file = io.StringIO()
    console.Console(file=file, width=120).print(bert)
    assert "Bert/layers/attention" in file.getvalue()
    assert "p['params']" in file.getvalue() and "f32[5,2,64,128]" in file.getvalue()


def test_html_is_well_formed(bert):
    class Parser(html.parser.HTMLParser):
        open_tags: list[str] = []
        void = {"br"}

        def handle_starttag(self, tag, attrs):
            if tag not in self.void:
                self.open_tags.append(tag)

        def handle_endtag(self, tag):
            assert self.open_tags.pop() == tag

    strange = dataclasses.replace(bert, name="<lambda>", notes=("a < b",))
    text = strange._repr_html_()
    parser = Parser()
    parser.feed(text)
    assert not parser.open_tags
    assert "<lambda>" not in text and "&lt;lambda&gt;" in text
    assert "Bert/layers/attention" in text and "<polygon" in text


@pytest.mark.parametrize("missing", ["hlo", "buffer_assignment", "live_range"])
def test_without_a_dump_the_sums_are_left(missing):
    result = dumps.stack_result()
    result = result | {"dump": result["dump"] | {missing: None}}
    report = dumps.report(result)
    assert sum(totals(report).values()) == report.peak_bytes
    assert "dumped no buffer assignment" in report.notes[0]
    assert "peak" in str(report) and report._repr_html_()


def test_a_dump_of_another_format_is_a_note():
    result = dumps.stack_result()
    result = result | {"dump": result["dump"] | {"buffer_assignment": "allocation x"}}
    report = dumps.report(result)
    assert "could not be read" in report.notes[0]
    assert sum(totals(report).values()) == report.peak_bytes


HBM, VMEM = "{1,0:T(8,128)(2,1)}", "{1,0:T(8,128)(2,1)S(1)}"
COPIES = f"""
ENTRY %main.1 (a: bf16[64,64], b: bf16[64,64], c: bf16[64,64]) -> bf16[64,64] {{
  %a.1 = bf16[64,64]{HBM} parameter(0)
  %b.1 = bf16[64,64]{HBM} parameter(1)
  %c.1 = bf16[64,64]{HBM} parameter(2)
  %s.1 = (bf16[64,64]{VMEM}, bf16[64,64]{HBM}, u32[]{{:S(2)}}) copy-start(%a.1)
  %s.2 = (bf16[64,64]{HBM}, bf16[64,64]{HBM}, u32[]{{:S(2)}}) copy-start(%b.1)
  %c.2 = bf16[64,64]{HBM} copy(%c.1)
}}
"""


def test_a_prefetch_to_a_tpus_own_memory_is_no_second_copy():
    assert copied_parameters(COPIES) == [1, 2]


def test_weights_cast_outside_the_loop_are_kept_twice():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w.astype(jnp.bfloat16)).astype(jnp.float32))

    result = dumps.compiled(
        jax.grad(loss, 1), jnp.ones((256, 256)), jnp.ones((8, 256), jnp.bfloat16)
    )
    report = dumps.report(result)
    copies = [h for h in report.at_peak if h.operation.startswith("cast of")]
    assert bool(copies) == any("in memory twice" in note for note in report.notes)


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (999, "999 B"), (1536, "1.50 KiB"), (15 * 2**30, "15.0 GiB")],
)
def test_bytes_as_text(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    "text, count",
    [
        ("14GiB", 14 * 2**30),
        ("16 GB", 16 * 10**9),
        ("14 GiB ", 14 * 2**30),
        ("1.5gib", 3 * 2**29),
        ("512MiB", 2**29),
        ("1.5kib", 1536),
        (".5 TiB", 2**39),
        ("2.", 2),
        ("0.1GB", 10**8),
        ("9007199254740993", 9007199254740993),  # no float between text and bytes
        ("7", 7),
        (7, 7),
        (9007199254740993, 9007199254740993),
        (0, 0),
        (1e9, 10**9),
        (12.7, 12),
        (np.int64(2**40), 2**40),
        (np.float32(8.0), 8),
        (np.array(5), 5),
        (jnp.int32(3), 3),
    ],
)
def test_bytes_from_text(text, count, untyped):
    assert parse_bytes(text) == count
    assert type(parse_bytes(text)) is int


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "3.3.3GiB", "1..5MiB", ".", "-5GiB", "14 GiX", "much", "inf", "nan"]
    + [-1, float("inf"), float("nan"), np.float64("inf"), "1,5GiB", "14 GiB GiB"],
)
def test_no_bytes(text):
    with pytest.raises(ValueError, match=f"memory={re.escape(repr(text))}: "):
        parse_bytes(text, "memory")


@pytest.mark.parametrize("text", [None, True, np.bool_(True), [1], {}, b"1GiB", 1j])
def test_no_bytes_at_all(text, untyped):
    with pytest.raises(TypeError, match=f"{re.escape(repr(text))}: bytes, .* '14GiB'"):
        parse_bytes(text)


@pytest.mark.parametrize("name", some_fast(["h100", "tpu-v5e"], "h100"))
def test_absent_chips(name):
    target = next(t for t in jaxmem.targets() if t.name == name)
    if not target.available:
        pytest.skip(f"this installation cannot compile for {name}")
    shapes = (5, 1024, 1024), (32768, 1024)  # more than a TPU keeps beside its cores
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    report = jaxmem.estimate(dumps.update, *args, target=name, donate_argnums=0)
    assert sum(totals(report).values()) == report.peak_bytes
    assert not any("could not be read" in note for note in report.notes)
    assert report.timeline
    modules = {h.module_path for h in report.at_peak if h.kind == "temp"}
    assert "stack/layer" in modules
    assert any(h.shape == (5, 32768, 1024) for h in report.at_peak)
