"""The parsers read what the compiler really writes, and all of it."""

import inspect
import pathlib

import jax.numpy as jnp

from jaxmem.memory.buffers.assignment import (
    array_shape,
    parse_buffer_assignment,
    parse_live_range,
)
from jaxmem.memory.buffers.hlo import parse_hlo
from jaxmem.memory.buffers.origin import Tracer
from tests.memory import dumps

# What another version and another target write.
SAMPLE = """BufferAssignment:
allocation 0: size 512, page 0, parameter 3, shape |u32[2]| at ShapeIndex {}:
 value: <1 key.1 @0> (size=512,offset=0): u32[2]{0:T(128)}
allocation 1: size 4096, color 1, page 0, preallocated-temp:
 value: <4681 while.110{40} (phi) @1> (size=1024,offset=2048): bf16[24,8]{1,0:T(8)S(1)}
 value: <12 start{1,0} @1> (size=16,offset=0): (f32[2]{0}, f32[2]{0})
allocation 2: size 64, maybe-live-out:
 value: <7 wrapped_add @0> (size=64,offset=0): f32[16]{0}

Total bytes used: 4672
"""


def test_every_value_and_allocation_is_read():
    text = dumps.stack_result()["dump"]["buffer_assignment"]
    allocations = parse_buffer_assignment(text)
    body = text.split("\n\n")[0].splitlines()
    values = [line for line in body if line.startswith(" value:")]
    assert sum(len(a.values) for a in allocations) == len(values) > 20
    assert [a.number for a in allocations] == list(range(len(allocations)))
    for a in allocations:
        assert all(v.offset + v.size <= a.size for v in a.values)


def test_sizes_are_the_compilers():
    result = dumps.stack_result()
    allocations = parse_buffer_assignment(result["dump"]["buffer_assignment"])
    arguments = sum(a.size for a in allocations if a.kind == "parameter")
    temporaries = sum(a.size for a in allocations if a.kind == "temp")
    assert arguments == result["memory"]["argument"]
    assert temporaries == result["memory"]["temp"]


def test_formats_of_other_targets():
    key, vmem, out = parse_buffer_assignment(SAMPLE)
    assert (key.kind, key.parameter, key.color) == ("parameter", 3, 0)
    assert (vmem.kind, vmem.color) == ("temp", 1)
    assert [v.key for v in vmem.values] == [("while.110", (40,)), ("start", (1, 0))]
    assert (vmem.values[0].size, vmem.values[0].offset) == (1024, 2048)
    assert (out.kind, out.live_out) == ("output", True)


def test_every_temporary_has_a_live_range():
    dump = dumps.stack_result()["dump"]
    live = parse_live_range(dump["live_range"])
    for a in parse_buffer_assignment(dump["buffer_assignment"]):
        for value in a.values if a.kind == "temp" else ():
            start, end = live.ranges[value.key]
            assert 0 <= start <= end <= len(live.sequence)


def test_array_shape():
    assert array_shape("f32[24,8]{1,0:T(8,128)}") == ("f32", (24, 8))
    assert array_shape("pred[]") == ("pred", ())
    assert array_shape("(f32[2]{0}, s32[])") is None
    assert array_shape("f32[<=8,2]{1,0}") == ("f32", (8, 2))


def test_source_lines_are_the_users():
    hlo = parse_hlo(dumps.stack_result()["dump"]["hlo"])
    lines, first = inspect.getsourcelines(dumps.stack_loss)
    expected = first + next(i for i, line in enumerate(lines) if "jnp.tanh" in line)
    found = [
        next(hlo.stack(instruction))
        for name in hlo.lines
        if (instruction := hlo.instruction(name)).opcode == "tanh"
    ]
    assert found and {f.line for f in found} == {expected}
    assert {pathlib.Path(f.file).name for f in found} == {"dumps.py"}


def test_stack_frames_that_count_parents_from_zero():
    text = "\n".join(
        [
            "HloModule m, is_scheduled=true",
            "FileNames",
            '1 "a.py"',
            "FunctionNames",
            '1 "outer"',
            '2 "inner"',
            "FileLocations",
            "1 {file_name_id=1 function_name_id=1 line=10}",
            "2 {file_name_id=1 function_name_id=2 line=20}",
            "StackFrames",
            "1 {file_location_id=1 parent_frame_id=0}",
            "2 {file_location_id=2 parent_frame_id=1}",
            "ENTRY %main (x: f32[]) -> f32[] {",
            "  %x = f32[] parameter(0)",
            '  ROOT %s = f32[] sine(%x), metadata={op_name="sin" stack_frame_id=2}',
            "}",
        ]
    )
    hlo = parse_hlo(text)
    stack = [(f.line, f.function) for f in hlo.stack(hlo.instruction("s"))]
    assert stack == [(20, "inner"), (10, "outer")]


def test_source_in_the_metadata_itself():
    text = (
        "ENTRY %main () -> f32[] {\n"
        '  ROOT %s = f32[] constant(1), metadata={op_name="c" source_file="/b/a.py"'
        " source_line=7}\n}"
    )
    hlo = parse_hlo(text)
    location = next(hlo.stack(hlo.instruction("s")))
    assert (location.file, location.line) == ("/b/a.py", 7)


def test_residuals_are_traced_through_the_loop():
    """Stacked residuals lie in a zero-filled array: the trace ends at the tanh."""
    dump = dumps.stack_result()["dump"]
    tracer = Tracer(parse_hlo(dump["hlo"]))
    allocations = parse_buffer_assignment(dump["buffer_assignment"])
    stacked = [
        tracer.origin(*value.key)
        for a in allocations
        for value in a.values
        if value.shape.startswith("f32[5,64,32]")
    ]
    assert "tanh" in {origin.name.operation for origin in stacked}
    assert {origin.name.module_path for origin in stacked} == {"stack/layer"}


def test_big_text_is_read_in_time():
    """Some 12 MB of text, as an unrolled model dumps, in well under ten seconds."""
    line = '  %s.{} = f32[64,64] sine(%x), metadata={{op_name="jit(f)/A_{}/sin"}}'
    body = [line.format(i, i) + " " * 100 for i in range(60_000)]
    text = "\n".join(["ENTRY %main (x: f32[64,64]) -> f32[64,64] {", *body, "}"])
    hlo = parse_hlo(text)
    assert len(hlo.lines) == 60_000
    assert Tracer(hlo).origin("s.59999").name.module_path == "A_59999"


def test_a_copied_argument_is_called_so():
    """XLA copies what two outputs alias."""
    result = dumps.compiled(lambda x: (x, jnp.sin(x)), jnp.ones((64,)))
    hlo = parse_hlo(result["dump"]["hlo"])
    copies = [n for n in hlo.lines if hlo.instruction(n).opcode == "copy"]
    origins = {Tracer(hlo).origin(n).name.operation for n in copies}
    assert origins == {"copy of x"}
