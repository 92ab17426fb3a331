"""What XLA:TPU writes and no other compiler does, in small: right, and with a fault."""

import re

import pytest

import jaxmem
from benchmarks.steps import tile_ways
from jaxmem.auditing._audit import audit_texts
from jaxmem.auditing._sharding import ModuleShardings
from jaxmem.memory.buffers import parse_hlo
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.tiling.tiles import Tiles

JOINED = """HloModule joined, is_scheduled=true

ENTRY %main (a: f32[4,256]) -> f32[4,256] {
  %a = f32[4,256]{1,0} parameter(0)
  %second = f32[1,256]{1,0} slice(%a), slice={[1:2], [0:256]}
  %first = f32[1,256]{1,0} slice(%a), slice={[0:1], [0:256]}
  %rest = f32[2,256]{1,0} slice(%a), slice={[2:4], [0:256]}
  %whole = f32[4,256]{1,0} custom-call(%second, %first, %rest), JOINED
  %seen = f32[1,256]{1,0} negate(%SEEN)
  ROOT %out = f32[4,256]{1,0} negate(%whole)
}
"""
PLACES = """BufferAssignment:
allocation 0: size 4096, parameter 0, shape |f32[4,256]| at ShapeIndex {}:
 value: <0 a @0> (size=4096,offset=0): f32[4,256]{1,0}
allocation 1: size 5120, preallocated-temp:
 value: <1 second @0> (size=1024,offset=1024): f32[1,256]{1,0}
 value: <2 first @0> (size=1024,offset=FIRST): f32[1,256]{1,0}
 value: <3 rest @0> (size=2048,offset=2048): f32[2,256]{1,0}
 value: <4 whole @0> (size=4096,offset=0): f32[4,256]{1,0}
 value: <5 seen @0> (size=1024,offset=4096): f32[1,256]{1,0}
allocation 2: size 4096, maybe-live-out:
 value: <6 out @0> (size=4096,offset=0): f32[4,256]{1,0}
"""


@pytest.mark.parametrize(
    ("seen", "first", "found"),
    [
        ("whole", 0, False),
        # parts that leave a gap do not make up the whole
        ("whole", 4096, True),
        # a part that is read once more is still a part, but not in the whole's name
        ("first", 0, True),
    ],
)
def test_a_value_that_is_put_together_of_parts(seen, first, found):
    hlo = JOINED.replace("%SEEN", f"%{seen}")
    hlo = hlo.replace("JOINED", 'custom_call_target="ConcatBitcast"')
    if seen == "whole":
        hlo = re.sub(r"  %seen = .*\n", "", hlo)
    rules = {f.rule for f in audit_texts(hlo, PLACES.replace("FIRST", str(first)))}
    assert rules == ({"shared_bytes"} if found else set())


# three iterations over a counter and two arrays, up to what the body makes of these
COUNTED = """%test.1 (p1: (s32[], f32[256], f32[256])) -> pred[] {
  %p1 = (s32[], f32[256]{0}, f32[256]{0}) parameter(0)
  %i1 = s32[] get-tuple-element(%p1), index=0
  %n1 = s32[] constant(3)
  ROOT %less1 = pred[] compare(%i1, %n1), direction=LT
}

%body.1 (q1: (s32[], f32[256], f32[256])) -> (s32[], f32[256], f32[256]) {
  %q1 = (s32[], f32[256]{0}, f32[256]{0}) parameter(0)
  %j1 = s32[] get-tuple-element(%q1), index=0
  %one1 = s32[] constant(1)
  %next1 = s32[] add(%j1, %one1)
"""
# a loop in which another one hands on what it was given, and adds to what it was not
LOOPS = (
    f"HloModule loops, is_scheduled=true\n\n{COUNTED}"
    + """\
  %kept1 = f32[256]{0} get-tuple-element(%q1), index=1
  %sum1 = f32[256]{0} get-tuple-element(%q1), index=2
  %more1 = f32[256]{0} add(%sum1, %kept1)
  ROOT %t1 = (s32[], f32[256]{0}, f32[256]{0}) tuple(%next1, %kept1, %more1)
}

ENTRY %main (a: f32[256], s: f32[256], z: s32[]) -> (f32[256], f32[256]) {
  %a = f32[256]{0} parameter(0)
  %s = f32[256]{0} parameter(1)
  %z = s32[] parameter(2)
  %old = f32[256]{0} negate(%a)
  %t = (s32[], f32[256]{0}, f32[256]{0}) tuple(%z, %old, %s)
  %loop = (s32[], f32[256]{0}, f32[256]{0}) while(%t), condition=%test.1, body=%body.1
  %sums = f32[256]{0} get-tuple-element(%loop), index=2
  %late = f32[256]{0} negate(%old)
  %also = f32[256]{0} add(%sums, %late)
  ROOT %r = (f32[256]{0}, f32[256]{0}) tuple(%sums, %also)
}
"""
)
LOOP_PLACES = """BufferAssignment:
allocation 0: size 1024, parameter 0, shape |f32[256]| at ShapeIndex {}:
 value: <0 a @0> (size=1024,offset=0): f32[256]{0}
allocation 1: size 1024, parameter 1, shape |f32[256]| at ShapeIndex {}, maybe-live-out:
 value: <1 s @0> (size=1024,offset=0): f32[256]{0}
 value: <2 q1{2} (phi) @0> (size=1024,offset=0): f32[256]{0}
 value: <3 p1{2} (phi) @0> (size=1024,offset=0): f32[256]{0}
 value: <4 more1 @0> (size=1024,offset=0): f32[256]{0}
 value: <5 loop{2} (phi) @0> (size=1024,offset=0): f32[256]{0}
allocation 2: size 4, parameter 2, shape |s32[]| at ShapeIndex {}:
 value: <6 z @0> (size=4,offset=0): s32[]
 value: <7 q1{0} (phi) @0> (size=4,offset=0): s32[]
 value: <8 p1{0} (phi) @0> (size=4,offset=0): s32[]
 value: <9 next1 @0> (size=4,offset=0): s32[]
 value: <10 loop{0} (phi) @0> (size=4,offset=0): s32[]
allocation 3: size 3072, preallocated-temp:
 value: <11 old @0> (size=1024,offset=0): f32[256]{0}
 value: <12 p1{1} (phi) @0> (size=1024,offset=0): f32[256]{0}
 value: <13 loop{1} (phi) @0> (size=1024,offset=0): f32[256]{0}
 value: <14 late @0> (size=1024,offset=1024): f32[256]{0}
 value: <15 less1 @0> (size=1,offset=2048): pred[]
allocation 4: size 1024, maybe-live-out:
 value: <16 also @0> (size=1024,offset=0): f32[256]{0}
"""
ALIASES = "input_output_alias={ {0}: (1, {}, may-alias), {1}: (2, {}, may-alias) }"


def test_what_a_loop_hands_on_is_its_operand():
    """XLA goes on listing it as the loop's own, but not in the loop's body."""
    hlo = LOOPS.replace("is_scheduled=true", f"is_scheduled=true, {ALIASES}", 1)
    found = audit_texts(hlo, LOOP_PLACES)
    assert "shared_bytes" not in {f.rule for f in found}
    # where the body has another value of it, the loop writes over it
    own = " value: <17 q1{1} (phi) @0> (size=1024,offset=0): f32[256]{0}\n"
    changed = hlo.replace("tuple(%next1, %kept1,", "tuple(%next1, %more1,")
    before = LOOP_PLACES.replace(" value: <14", own + " value: <14")
    assert "shared_bytes" in {f.rule for f in audit_texts(changed, before)}


# a loop that begins with one value at two places, and makes one of both
TWICE = (
    f"HloModule twice, is_scheduled=true\n\n{COUNTED}"
    + """\
  %left1 = f32[256]{0} get-tuple-element(%q1), index=1
  %right1 = f32[256]{0} get-tuple-element(%q1), index=2
  %both1 = f32[256]{0} add(%left1, %right1)
  %made1 = f32[256]{0} negate(%both1)
  ROOT %t1 = (s32[], f32[256]{0}, f32[256]{0}) tuple(%next1, %made1, %made1)
}

ENTRY %main (a: f32[256], z: s32[]) -> f32[256] {
  %a = f32[256]{0} parameter(0)
  %z = s32[] parameter(1)
  %old = f32[256]{0} negate(%a)
  %other = f32[256]{0} exponential(%a)
  %t = (s32[], f32[256]{0}, f32[256]{0}) tuple(%z, %old, %SECOND)
  %loop = (s32[], f32[256]{0}, f32[256]{0}) while(%t), condition=%test.1, body=%body.1
  %first = f32[256]{0} get-tuple-element(%loop), index=1
  %second = f32[256]{0} get-tuple-element(%loop), index=2
  ROOT %r = f32[256]{0} add(%first, %second)
}
"""
)
TWICE_PLACES = """BufferAssignment:
allocation 0: size 1024, parameter 0, shape |f32[256]| at ShapeIndex {}:
 value: <0 a @0> (size=1024,offset=0): f32[256]{0}
allocation 1: size 4, parameter 1, shape |s32[]| at ShapeIndex {}:
 value: <1 z @0> (size=4,offset=0): s32[]
 value: <2 q1{0} (phi) @0> (size=4,offset=0): s32[]
 value: <3 p1{0} (phi) @0> (size=4,offset=0): s32[]
 value: <4 next1 @0> (size=4,offset=0): s32[]
 value: <5 loop{0} (phi) @0> (size=4,offset=0): s32[]
allocation 2: size 4096, preallocated-temp:
 value: <6 old @0> (size=1024,offset=0): f32[256]{0}
 value: <7 p1{1} (phi) @0> (size=1024,offset=0): f32[256]{0}
 value: <8 p1{2} (phi) @0> (size=1024,offset=0): f32[256]{0}
 value: <9 q1{1} (phi) @0> (size=1024,offset=0): f32[256]{0}
 value: <10 q1{2} (phi) @0> (size=1024,offset=0): f32[256]{0}
 value: <11 made1 @0> (size=1024,offset=0): f32[256]{0}
 value: <12 loop{1} (phi) @0> (size=1024,offset=0): f32[256]{0}
 value: <13 loop{2} (phi) @0> (size=1024,offset=0): f32[256]{0}
 value: <14 both1 @0> (size=1024,offset=1024): f32[256]{0}
 value: <15 other @0> (size=1024,offset=2048): f32[256]{0}
 value: <16 less1 @0> (size=1,offset=3072): pred[]
allocation 3: size 1024, maybe-live-out:
 value: <17 r @0> (size=1024,offset=0): f32[256]{0}
"""


@pytest.mark.parametrize(("second", "found"), [("old", False), ("other", True)])
def test_one_value_at_two_places_of_a_loop_has_one_buffer(second, found):
    # the counter's buffer may be written
    donated = "input_output_alias={ {1}: (1, {}, may-alias) }"
    hlo = TWICE.replace("is_scheduled=true", f"is_scheduled=true, {donated}", 1)
    found_in = audit_texts(hlo.replace("SECOND", second), TWICE_PLACES)
    rules = {f.rule for f in found_in} - {"donations"}
    assert ("two_outputs" in rules) == found
    assert found or not rules


# the source of a collective, which parts of it hand on through a loop
HANDED = """%begins (x: f32[256]) -> (f32[256], f32[256]) {
  %x = f32[256]{0} parameter(0)
  %got = f32[256]{0} negate(%x)
  ROOT %ts = (f32[256]{0}, f32[256]{0}) tuple(%x, %got)
}

%goes_on (y: f32[256], w: f32[256]) -> (f32[256], f32[256]) {
  %y = f32[256]{0} parameter(0)
  %w = f32[256]{0} parameter(1)
  %more = f32[256]{0} negate(%w)
  ROOT %tm = (f32[256]{0}, f32[256]{0}) tuple(%y, %more)
}

""" + LOOPS.split("\n", 2)[2].replace(
    "%more1 = f32[256]{0} add(%sum1, %kept1)",
    """%async_on = (f32[256]{0}, f32[256]{0}) fusion(%kept1, %sum1), kind=kOutput, \
output_to_operand_aliasing={{0}: (0, {})}, calls=%goes_on
  %handed1 = f32[256]{0} get-tuple-element(%async_on), index=0
  %more1 = f32[256]{0} get-tuple-element(%async_on), index=1""",
).replace("tuple(%next1, %kept1,", "tuple(%next1, %handed1,").replace(
    "tuple(%z, %old, %s)",
    """tuple(%z, %source, %s)""",
).replace(
    "  %t = (s32[]",
    """  %async_begin = (f32[256]{0}, f32[256]{0}) fusion(%old), kind=kCustom, \
output_to_operand_aliasing={{0}: (0, {})}, calls=%begins
  %source = f32[256]{0} get-tuple-element(%async_begin), index=0
  %t = (s32[]""",
)
HANDED_PLACES = LOOP_PLACES.replace("more1", "async_on{1}").replace(
    " value: <14",
    """ value: <17 q1{1} (phi) @0> (size=1024,offset=0): f32[256]{0}
 value: <18 async_begin{0} @0> (size=1024,offset=0): f32[256]{0}
 value: <19 async_begin{1} @0> (size=1024,offset=1024): f32[256]{0}
 value: <20 async_on{0} @0> (size=1024,offset=0): f32[256]{0}
 value: <14""",
)


def test_what_parts_of_a_collective_hand_on_in_a_loop_is_their_source():
    head = f"HloModule handed, is_scheduled=true, {ALIASES}\n\n"
    found = audit_texts(head + HANDED, HANDED_PLACES)
    assert "shared_bytes" not in {f.rule for f in found}
    # one that makes a value of its own there writes over the source, which is read
    own = HANDED.replace("{{0}: (0, {})}, calls=%goes_on", "{}, calls=%goes_on")
    assert own != HANDED
    found = audit_texts(head + own, HANDED_PLACES)
    assert "shared_bytes" in {f.rule for f in found}


FLAGS = """HloModule flags, is_scheduled=true

ENTRY %main (a: s32[1]) -> s32[1] {
  %a = s32[1]{0} parameter(0)
  %first = KIND negate(%a)
  %second = KIND negate(%a)
  ROOT %out = s32[1]{0} add(%first, %second)
}
"""
FLAG_PLACES = """BufferAssignment:
allocation 0: size 4, parameter 0, shape |s32[1]| at ShapeIndex {}:
 value: <0 a @0> (size=4,offset=0): s32[1]{0}
allocation 1: size 4, preallocated-temp:
 value: <1 first @0> (size=4,offset=0): KIND
 value: <2 second @0> (size=4,offset=0): KIND
allocation 2: size 4, maybe-live-out:
 value: <3 out @0> (size=4,offset=0): s32[1]{0}
"""


@pytest.mark.parametrize(
    ("kind", "found"), [("s32[1]{0:T(128)S(2)}", False), ("s32[1]{0}", True)]
)
def test_flags_that_parts_of_a_tpu_wait_for_are_no_values(kind, found):
    texts = (text.replace("KIND", kind) for text in (FLAGS, FLAG_PLACES))
    rules = {finding.rule for finding in audit_texts(*texts)}
    assert rules == ({"shared_bytes"} if found else set())


# a sparse core is woken before it is told what to read, and only then writes
SPARSE = """HloModule sparse, is_scheduled=true, num_partitions=2

%of_one (x: f32[256]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  ROOT %got = f32[256]{0} negate(%x)
}

ENTRY %main (a: f32[256]) -> f32[256] {
  %a = f32[256]{0} parameter(0), sharding={devices=[2]<=[2]}
  %old = f32[256]{0} exponential(%a)
  %start = ((), (), (s32[1]{0:S(2)})) async-start(), calls=%of_one
  %READ
  %start.update = ((f32[256]{0}), f32[256]{0}) async-update(%start, %a)
  %READ_LATER
  %done = f32[256]{0} async-done(%start.update)
  ROOT %sum = f32[256]{0} add(%new, %done)
}
"""
SPARSE_PLACES = """BufferAssignment:
allocation 0: size 1024, parameter 0, shape |f32[256]| at ShapeIndex {}:
 value: <0 a @0> (size=1024,offset=0): f32[256]{0}
allocation 1: size 2048, preallocated-temp:
 value: <1 old @0> (size=1024,offset=0): f32[256]{0}
 value: <2 got @0> (size=1024,offset=0): f32[256]{0}
 value: <3 new @0> (size=1024,offset=1024): f32[256]{0}
allocation 2: size 1024, maybe-live-out:
 value: <4 sum @0> (size=1024,offset=0): f32[256]{0}
"""


@pytest.mark.parametrize(("place", "found"), [("%READ", False), ("%READ_LATER", True)])
def test_a_sparse_core_writes_from_where_it_is_told_what_to_read(place, found):
    read = "%new = f32[256]{0} negate(%old)"
    lines = SPARSE.replace(f"  {place}\n", f"  {read}\n").splitlines(keepends=True)
    hlo = "".join(line for line in lines if "%READ" not in line)
    rules = {finding.rule for finding in audit_texts(hlo, SPARSE_PLACES)}
    assert rules == ({"shared_bytes"} if found else set())
    (sum_,) = ModuleShardings(parse_hlo(hlo)).outputs
    assert sum_ is not None and sum_.who == (0, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_jax")
def test_tiles_of_layers_that_a_tpu_copies_in_slices():
    step = tile_ways.STEPS["16 Llama-like layers, 2 x 2048"]("plain")
    choice = Choice("tpu-v5e", (Recompute(4e10), Tiles(57_721_792)))
    made, _ = tile_ways.in_tiles(step, choice)
    report = jaxmem.estimate(
        made, *step.args, target="tpu-v5e", donate_argnums=step.donate
    )
    texts = report.compiler_texts()
    assert "ConcatBitcast" in texts[0]
    assert audit_texts(*texts) == ()
