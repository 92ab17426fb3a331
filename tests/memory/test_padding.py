"""Padding to tiles: bytes as a TPU's compiler assigns them, over those of elements."""

import io
import math
import re

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.memory import MemoryReport
from jaxmem.memory.buffers import PaddedAxis, padded_axes
from jaxmem.memory.buffers.padding import layout_of, padding_of
from jaxmem.memory.buffers.rows import PeakBuffer
from jaxmem.memory.report.groups import BufferRow
from jaxmem.memory.report.padded import padded_cell
from tests.memory import dumps
from tests.memory.test_estimate import needs_h100, needs_tpu

SDS = jax.ShapeDtypeStruct
LONG = 1 << 16
# shape, dtype, bits of an element
ARRAYS = {
    "scalar": ((), "float32", 32),
    "vector": ((LONG + 3,), "float32", 32),
    "n1_f32": ((LONG, 1), "float32", 32),
    "n3_f32": ((LONG, 3), "float32", 32),
    "n1_bf16": ((LONG, 1), "bfloat16", 16),
    "n3_bf16": ((LONG, 3), "bfloat16", 16),
    "n3_i8": ((LONG, 3), "int8", 8),
    "n1_pred": ((LONG, 1), "bool", 8),
    "odd_i4": ((1001, 1001), "int4", 4),
    "aligned_f32": ((256, 512), "float32", 32),
    "aligned_bf16": ((256, 512), "bfloat16", 16),
    "aligned_i8": ((256, 512), "int8", 8),
}


def in_tiles(shape, bits, layout) -> int:
    """Bytes of an array whose minor axes are rounded up to the first tile."""
    order, tile = re.match(r"\{([\d,]*):T\(([\d,]+)\)", layout).groups()
    minor = [int(n) for n in order.split(",") if n]
    tile = [int(n) for n in tile.split(",")][::-1]
    if not shape:
        return tile[0] * bits // 8
    sizes = list(shape)
    for axis, unit in zip(minor, tile, strict=False):
        sizes[axis] = -(-sizes[axis] // unit) * unit
    return math.prod(sizes) * bits // 8


@needs_tpu
def test_arguments_and_outputs_are_what_their_tiles_say():
    """Each alone at the peak, so that none is too small for a row."""
    paddings = {}
    for name, (shape, dtype, bits) in ARRAYS.items():
        fn = lambda x: ~x if x.dtype == bool else -x
        report = jaxmem.estimate(fn, SDS(shape, dtype), target="tpu-v5e")
        unpadded = -(-math.prod(shape) * bits // 8)
        for kind in ("argument", "output"):
            (row,) = (b for b in report.at_peak if b.kind == kind and b.shape == shape)
            assert row.unpadded_bytes == unpadded, name
            assert row.bytes == in_tiles(shape, bits, row.layout), name
        assert report.padding_bytes == sum(b.padding for b in report.at_peak)
        paddings[name] = report.padding_bytes
    # f32[n,1] has tiles of 1 by 128
    unpadded = {"n1_f32", "aligned_f32", "aligned_bf16", "aligned_i8"}
    assert {name for name, padding in paddings.items() if not padding} == unpadded
    assert paddings["scalar"] == 2 * (512 - 4)


def interleaved(x, y):
    return jnp.stack([x, y], -1).reshape(-1)


@pytest.fixture(scope="module")
def padded():
    x = SDS((1 << 18,), jnp.float32)
    return jaxmem.estimate(interleaved, x, x, target="tpu-v5e")


@needs_tpu
def test_a_temporary_of_64_times_its_elements(padded):
    row = padded.at_peak[0]
    assert (row.kind, row.array) == ("temp", "f32[262144,2]")
    assert row.bytes == 64 * row.unpadded_bytes == 64 * 8 * 2**18
    assert row.bytes == in_tiles(row.shape, 32, row.layout)
    assert padded.padding_bytes >= row.padding > 0.9 * padded.peak_bytes


@needs_tpu
def test_every_form_of_the_report_tells_it(padded):
    share = 100 * padded.padding_bytes / padded.peak_bytes
    size = jaxmem.memory.format_bytes(padded.padding_bytes)
    total = f"of the peak {size} ({share:.1f} %) is padding"
    assert total in str(padded)
    assert re.search(r"128 MiB  2.00 MiB padded 64x +f32\[262144,2\]", str(padded))
    title, body = padded._html()
    assert total in str(body) and "2.00 MiB padded 64x" in str(body)
    read = MemoryReport.from_json(padded.to_json())
    assert read.padding_bytes == padded.padding_bytes and str(read) == str(padded)
    from rich.console import Console

    console = Console(file=io.StringIO(), width=200)
    console.print(padded)
    text = console.file.getvalue()
    assert total in text and "without padding" in text and "padded 64x" in text


@needs_h100
def test_a_gpu_pads_nothing():
    x = SDS((1001,), jnp.float32)
    report = jaxmem.estimate(interleaved, x, x, target="h100")
    assert report.padding_bytes == 0
    assert "padded" not in str(report) + str(report._html()[1])
    assert "is padding" not in str(report)


def test_a_cpu_pads_nothing():
    report = dumps.report(dumps.stack_result(), argument_names=["weights", "x"])
    assert report.padding_bytes == 0 and not any(b.layout for b in report.at_peak)
    assert "padded" not in str(report) + str(report._html()[1])


def test_shapes_without_tiles_or_of_tuples():
    assert padding_of("f32[3,3]{1,0}", 4096) == 0
    assert padding_of("(f32[3]{0:T(128)}, f32[3]{0:T(128)})", 512) == 0
    assert layout_of("f32[3,3]{1,0}") == layout_of("token[]") == ""
    assert layout_of("u32[8,1]{1,0:T(8,128)S(1)}") == "{1,0:T(8,128)}"
    assert padding_of("s4[1001,1001]{1,0:T(8,128)(8,1)E(4)}", 516096) == 15_095


def test_the_axes_that_are_padded():
    assert padded_axes((9, 2), "{1,0:T(8,128)}") == (
        PaddedAxis(1, 2, 128),
        PaddedAxis(0, 9, 16),
    )
    assert padded_axes((9, 2), "{0,1:T(2,128)}") == (PaddedAxis(0, 9, 128),)
    assert padded_axes((5, 16, 128), "{2,1,0:T(8,128)(2,1)}") == ()
    assert padded_axes((), "{:T(128)}") == padded_axes((2, 2), "") == ()


@pytest.mark.parametrize(
    ("size", "padding", "cell"),
    [
        (4096, 0, ""),
        (4096, 16, ""),
        (4096, 1024, "3.00 KiB padded 1.33x"),
        (2**21, 2**21 - 1024, "1.00 KiB padded 2048x"),
    ],
)
def test_the_column(size, padding, cell):
    buffer = PeakBuffer(size, "temp", "x", (8,), "float32")
    assert padded_cell(BufferRow(buffer, size, 1, padding)) == cell
