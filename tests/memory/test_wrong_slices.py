"""Slices of the host's arrays: where they are taken from, and where that is wrong."""

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxmem import estimate
from jaxmem.ir.host_slices import AFFECTED, COPIES
from jaxmem.memory import MemoryReport
from jaxmem.memory.buffers import parse_hlo, wrong_slices
from tests.memory.test_estimate import needs_h100

# the package has the function of that name
checked = importlib.import_module("jaxmem.memory.buffers.wrong_slices")

N, ROW = 8, 4 * 16  # layers, and bytes of one

READ = """
%copied (p.0: f32[8,16], p.1: INDEX[], p.2: INDEX[]) -> f32[1,16] {
  %p.0 = f32[8,16]{1,0:S(5)} parameter(0)
  %p.1 = INDEX[] parameter(1)
  %p.2 = INDEX[] parameter(2)
  ROOT %slice = f32[1,16]{1,0} dynamic-slice(%p.0, %p.1, %p.2), dynamic_slice_sizes={1,16}, metadata={op_name="jit(step)/while/body/dynamic_slice"}, backend_config={"dynamic_slice_config":LINE}
}

%async (q.0: f32[8,16], q.1: INDEX[], q.2: INDEX[]) -> f32[1,16] {
  %q.0 = f32[8,16]{1,0:S(5)} parameter(0)
  %q.1 = INDEX[] parameter(1)
  %q.2 = INDEX[] parameter(2)
  ROOT %wrapped = f32[1,16]{1,0} fusion(%q.0, %q.1, %q.2), kind=kCustom, calls=%copied
}
"""  # noqa: E501
START = "%start = ((f32[8,16]{1,0:S(5)}, INDEX[], INDEX[]), f32[1,16]{1,0}, u32[]) "
START += "async-start(%stack, %at, %zero), calls=%async"

WRITTEN = """
%copied (p.0: f32[8,16], p.3: f32[1,16], p.1: INDEX[], p.2: INDEX[]) -> f32[8,16] {
  %p.0 = f32[8,16]{1,0:S(5)} parameter(0)
  %p.3 = f32[1,16]{1,0} parameter(1)
  %p.1 = INDEX[] parameter(2)
  %p.2 = INDEX[] parameter(3)
  ROOT %slice = f32[8,16]{1,0:S(5)} dynamic-update-slice(%p.0, %p.3, %p.1, %p.2), backend_config={"dynamic_slice_config":LINE}
}
"""  # noqa: E501
WRITES = "%start = f32[8,16]{1,0:S(5)} fusion(%stack, %row, %at, %zero), calls=%copied"

LOOP = """
%index (r.0: INDEX[]) -> INDEX[] {
  %r.0 = INDEX[] parameter(0)
  %last = INDEX[] constant(7)
  %two = INDEX[] constant(2)
  %more = INDEX[] constant(ONE_LESS)
  ROOT %found = INDEX[] FOUND
}

%body (carry: (INDEX[], f32[8,16])) -> (INDEX[], f32[8,16]) {
  %carry = (INDEX[], f32[8,16]{1,0:S(5)}) parameter(0)
  %i = INDEX[] get-tuple-element(%carry), index=0
  %stack = f32[8,16]{1,0:S(5)} get-tuple-element(%carry), index=1
  %at = INDEX[] fusion(%i), kind=kLoop, calls=%index
  %zero = INDEX[] constant(0)
  %row = f32[1,16]{1,0} custom-call(), custom_call_target="row"
  DONE
  %one = INDEX[] constant(1)
  %next = INDEX[] add(%i, %one)
  ROOT %left = (INDEX[], f32[8,16]{1,0:S(5)}) tuple(%next, %stack)
}

%goes_on (c: (INDEX[], f32[8,16])) -> pred[] {
  %c = (INDEX[], f32[8,16]{1,0:S(5)}) parameter(0)
  ROOT %known = pred[] constant(true)
}

ENTRY %main (x: f32[8,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0:S(5)} parameter(0)
  %begin = INDEX[] constant(0)
  %first = (INDEX[], f32[8,16]{1,0:S(5)}) tuple(%begin, %x)
  %loop = (INDEX[], f32[8,16]{1,0:S(5)}) while(%first), condition=%goes_on, body=%body, backend_config={"known_trip_count":{"n":"8"}}
  ROOT %out = f32[8,16]{1,0:S(5)} get-tuple-element(%loop), index=1
}
"""  # noqa: E501
BACKWARDS = "subtract(%last, %r.0)"


def module(line, index, dtype="s32", written=False):
    """A loop that takes a row at an index, which is copied along a line."""
    copied, start = (WRITTEN, WRITES) if written else (READ, START)
    text = "HloModule step\n" + copied + LOOP.replace("DONE", start)
    less = {"s32": "-1", "u32": str(2**32 - 1)}[dtype]
    text = text.replace("FOUND", index).replace("ONE_LESS", less)
    return text.replace("INDEX", dtype).replace("LINE", line)


def line(first, step, inside=False):
    """As jax 0.10 and 0.11 write it; `inside` as 0.12."""
    text = f'{{"byte_offset":"{first}","byte_stride":"{step}"'
    if inside:
        text = f'{{"byte_offset":"0","byte_stride":"0","linear":{text}}}'
    return f'{text},"loop_index":"0"}}'


FORWARDS, BACK = (0, ROW), (7 * ROW, -ROW)

# `as_text()` of the gradient of a scan whose residuals a policy of JAX's sends away, of
# the lines that a slice depends on
AS_TEXT = """HloModule jit_step, is_scheduled=true

SLICE

%fused_subtract (param_0.22: s32[]) -> s32[] {
  %constant_36_1 = s32[] constant(7)
  %param_0.22 = s32[] parameter(0), metadata={scheduling_name="param_0.22"}
  ROOT %subtract.2 = s32[] subtract(%constant_36_1, %param_0.22), metadata={scheduling_name="subtract.2" stack_frame_id=23}
}

%fused_add (param_0.4: s32[]) -> s32[] {
  %param_0.4 = s32[] parameter(0), metadata={scheduling_name="param_0.4"}
  %constant_13_1 = s32[] constant(1)
  ROOT %add.3.1 = s32[] add(%param_0.4, %constant_13_1), metadata={scheduling_name="add.3.1" stack_frame_id=50}
}

%region_2.9 (arg_tuple.5: (s32[], f32[8,8192,1024])) -> (s32[], f32[8,8192,1024]) {
  %arg_tuple.5 = (s32[], f32[8,8192,1024]{2,1,0:S(5)}) parameter(0), metadata={scheduling_name="arg_tuple.5"}
  %get-tuple-element.39 = s32[] get-tuple-element(%arg_tuple.5), index=0, metadata={scheduling_name="get-tuple-element.39"}
  %loop_subtract_fusion = s32[] fusion(%get-tuple-element.39), kind=kLoop, calls=%fused_subtract, metadata={scheduling_name="loop_subtract_fusion" stack_frame_id=23}
  %constant_5_0 = s32[] constant(0)
  %get-tuple-element.57 = f32[8,8192,1024]{2,1,0:S(5)} get-tuple-element(%arg_tuple.5), index=1, metadata={scheduling_name="get-tuple-element.57"}
  %bitcast.2.0 = f32[1,8192,1024]{2,1,0} custom-call(), custom_call_target="row"
  START
  %loop_add_fusion.1 = s32[] fusion(%get-tuple-element.39), kind=kLoop, calls=%fused_add, control-predecessors={%loop_subtract_fusion}, metadata={scheduling_name="loop_add_fusion.1" stack_frame_id=23}
  ROOT %tuple.14 = (s32[], f32[8,8192,1024]{2,1,0:S(5)}) tuple(%loop_add_fusion.1, %get-tuple-element.57), metadata={scheduling_name="tuple.14"}
}

%region_3.10 (arg_tuple.7: (s32[], f32[8,8192,1024])) -> pred[] {
  %arg_tuple.7 = (s32[], f32[8,8192,1024]{2,1,0:S(5)}) parameter(0)
  ROOT %known = pred[] constant(true)
}

ENTRY %main.12 (x.1: f32[8,8192,1024]) -> f32[8,8192,1024] {
  %x.1 = f32[8,8192,1024]{2,1,0:S(5)} parameter(0)
  %constant_61 = s32[] constant(0)
  %copy.28 = s32[] copy(%constant_61), metadata={scheduling_name="copy.28"}
  %tuple.8 = (s32[], f32[8,8192,1024]{2,1,0:S(5)}) tuple(%copy.28, %x.1), metadata={scheduling_name="tuple.8"}
  %while.6 = (s32[], f32[8,8192,1024]{2,1,0:S(5)}) while(%tuple.8), condition=%region_3.10, body=%region_2.9, backend_config={"known_trip_count":{"n":"8"},"known_init_step":{"init":"0","step":"1"},"known_induction_variable":{"tuple_index":"0"}}
  ROOT %get-tuple-element.1 = f32[8,8192,1024]{2,1,0:S(5)} get-tuple-element(%while.6), index=1
}
"""  # noqa: E501
READ_AS_TEXT = """%wrapped_dynamic-slice_computation (param_0.27: f32[8,8192,1024], param_1.32: s32[], param_2.20: s32[], param_3.10: s32[]) -> f32[1,8192,1024] {
  %param_0.27 = f32[8,8192,1024]{2,1,0:S(5)} parameter(0), metadata={scheduling_name="param_0.27"}
  %param_1.32 = s32[] parameter(1), metadata={scheduling_name="param_1.32"}
  %param_2.20 = s32[] parameter(2), metadata={scheduling_name="param_2.20"}
  %param_3.10 = s32[] parameter(3), metadata={scheduling_name="param_3.10"}
  ROOT %dynamic_slice.10.1 = f32[1,8192,1024]{2,1,0} dynamic-slice(%param_0.27, %param_1.32, %param_2.20, %param_3.10), dynamic_slice_sizes={1,8192,1024}, metadata={scheduling_name="dynamic_slice.10.1" stack_frame_id=32}, backend_config={"operation_queue_id":"0","force_earliest_schedule":false,"reification_cost":[],"device_type":"DEVICE_TYPE_INVALID","dynamic_slice_config":CONFIG}
}"""  # noqa: E501
READS_AS_TEXT = """%dynamic-slice-start.1 = ((f32[8,8192,1024]{2,1,0:S(5)}, s32[], s32[], s32[]), f32[1,8192,1024]{2,1,0}, u32[]) fusion-start(%get-tuple-element.57, %loop_subtract_fusion, %constant_5_0, %constant_5_0), kind=kLoop, calls=%wrapped_dynamic-slice_computation, metadata={scheduling_name="dynamic-slice-start.1" stack_frame_id=32}
  %dynamic-slice-done.1 = f32[1,8192,1024]{2,1,0} fusion-done(%dynamic-slice-start.1), metadata={scheduling_name="dynamic-slice-done.1" stack_frame_id=32}"""  # noqa: E501
WRITTEN_AS_TEXT = """%wrapped_dynamic-update-slice_computation (param_0.26: f32[8,8192,1024], param_1.31: f32[1,8192,1024], param_2.19: s32[], param_3.9: s32[], param_4.1: s32[]) -> f32[8,8192,1024] {
  %param_0.26 = f32[8,8192,1024]{2,1,0:S(5)} parameter(0), metadata={scheduling_name="param_0.26"}
  %param_1.31 = f32[1,8192,1024]{2,1,0} parameter(1), metadata={scheduling_name="param_1.31"}
  %param_2.19 = s32[] parameter(2), metadata={scheduling_name="param_2.19"}
  %param_3.9 = s32[] parameter(3), metadata={scheduling_name="param_3.9"}
  %param_4.1 = s32[] parameter(4), metadata={scheduling_name="param_4.1"}
  ROOT %dynamic_update_slice.6.1 = f32[8,8192,1024]{2,1,0:S(5)} dynamic-update-slice(%param_0.26, %param_1.31, %param_2.19, %param_3.9, %param_4.1), metadata={scheduling_name="dynamic_update_slice.6.1" stack_frame_id=57}, backend_config={"operation_queue_id":"0","force_earliest_schedule":false,"reification_cost":[],"device_type":"DEVICE_TYPE_INVALID","dynamic_slice_config":CONFIG}
}"""  # noqa: E501
WRITES_AS_TEXT = """%dynamic-update-slice-start.1 = ((f32[8,8192,1024]{2,1,0:S(5)}, f32[1,8192,1024]{2,1,0}, s32[], s32[], s32[]), f32[8,8192,1024]{2,1,0:S(5)}, u32[]) fusion-start(%get-tuple-element.57, %bitcast.2.0, %get-tuple-element.39, %constant_5_0, %constant_5_0), kind=kLoop, calls=%wrapped_dynamic-update-slice_computation, metadata={scheduling_name="dynamic-update-slice-start.1" stack_frame_id=30}
  %dynamic-update-slice-done.1 = f32[8,8192,1024]{2,1,0:S(5)} fusion-done(%dynamic-update-slice-start.1), metadata={scheduling_name="dynamic-update-slice-done.1" stack_frame_id=30}"""  # noqa: E501
# of the backward read, and of the forward write: the latter is the loop's counter
BYTES = 8192 * 1024 * 4
LINES = {
    "0.10.2": (
        f'{{"loop_index":"0","byte_offset":"0","byte_stride":"{BYTES}"}}',
        f'{{"loop_index":"0","byte_offset":"0","byte_stride":"{BYTES}"}}',
    ),
    "0.11.2": (
        f'{{"loop_index":"0","byte_offset":"{7 * BYTES}","byte_stride":"-{BYTES}"}}',
        f'{{"loop_index":"0","byte_offset":"0","byte_stride":"{BYTES}"}}',
    ),
    "0.12.0.1": (
        '{"loop_index":"0","byte_offset":"0","byte_stride":"0","linear":'
        f'{{"byte_offset":"{7 * BYTES}","byte_stride":"-{BYTES}"}}}}',
        '{"loop_index":"0","byte_offset":"0","byte_stride":"0","linear":'
        f'{{"byte_offset":"0","byte_stride":"{BYTES}"}}}}',
    ),
}


def of_a_compiled_program(version, written):
    """The text of a version of jax; in 0.10.2 the slices are in custom fusions."""
    slice_, start = (
        (WRITTEN_AS_TEXT, WRITES_AS_TEXT) if written else (READ_AS_TEXT, READS_AS_TEXT)
    )
    if version == "0.10.2":
        # which copies what was sliced: the root is another
        start = start.replace("kind=kLoop", "kind=kCustom")
        if not written:
            copied = "ROOT %copy.36 = f32[1,8192,1024]{2,1,0} copy(%dynamic_slice.10.1)"
            slice_ = slice_.replace("ROOT ", "").replace("\n}", f"\n  {copied}\n}}")
    slice_ = slice_.replace("CONFIG", LINES[version][written])
    return AS_TEXT.replace("SLICE", slice_).replace("START", start)


@pytest.fixture
def trusted(monkeypatch):
    """A version whose lines are right: nothing is said of what cannot be followed."""
    monkeypatch.setattr(checked, "AFFECTED", False)


@pytest.fixture
def affected(monkeypatch):
    monkeypatch.setattr(checked, "AFFECTED", True)


@pytest.mark.parametrize("version", LINES)
def test_texts_of_compiled_programs_call_a_fusion_asynchronously(version, affected):
    """As `fusion-start`; on an H200 what jax 0.11.2 compiled was right to the bit."""
    text = of_a_compiled_program(version, written=False)
    assert text.count(" fusion-start(") == 1 and " async-start(" not in text
    wrong = {"0.10.2": [(0, 0, 7 * BYTES)]}.get(version, [])
    found = wrong_slices(parse_hlo(text))
    assert [(one.iteration, one.offset, one.wanted) for one in found] == wrong
    # followed, and not only left out where nothing is known
    hidden = text.replace("subtract(%constant_36_1, %param_0.22)", "custom-call()")
    (one,) = wrong_slices(parse_hlo(hidden))
    assert one.wanted is None and one.offset == (0 if wrong else 7 * BYTES)


@pytest.mark.parametrize("version", LINES)
def test_a_forward_scan_writes_in_a_fusion_that_is_started(version, affected):
    text = of_a_compiled_program(version, written=True)
    assert text.count(" fusion-start(") == 1
    assert not wrong_slices(parse_hlo(text))
    back = text.replace("%bitcast.2.0, %get-tuple-element.39", "%bitcast.2.0, %back")
    made = "  %back = s32[] fusion(%get-tuple-element.39), kind=kLoop, "
    made += "calls=%fused_subtract\n  %bitcast.2.0 ="
    (one,) = wrong_slices(parse_hlo(back.replace("  %bitcast.2.0 =", made)))
    assert one.written and (one.offset, one.wanted) == (0, 7 * BYTES)


@pytest.mark.parametrize("written", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("index", "meant"),
    [
        ("copy(%r.0)", FORWARDS),
        (BACKWARDS, BACK),
        ("add(%last, %more)", (6 * ROW, 0)),  # of a u32 adding it takes one away
        ("multiply(%r.0, %two)", (0, 2 * ROW)),  # kept in the array
        ("clamp(%two, %two, %last)", (2 * ROW, 0)),
    ],
)
@pytest.mark.parametrize("dtype", ["s32", "u32"])
def test_a_line_is_that_of_the_index_or_told(index, meant, dtype, inside, written):
    for told in (FORWARDS, BACK, (6 * ROW, 0), (0, 2 * ROW), (2 * ROW, 0)):
        text = module(line(*told, inside), index, dtype, written)
        found = wrong_slices(parse_hlo(text))
        if told == meant:
            assert not found
            continue
        (one,) = found
        assert one.written == written and one.offset != one.wanted
        at = lambda first, step, k=one.iteration: min(first + k * step, 7 * ROW)
        assert (one.offset, one.wanted) == (at(*told), at(*meant))


UNKNOWN = "custom-call(%r.0), custom_call_target=foo"


def test_what_an_index_is_made_of_may_not_be_known(affected):
    text = module(line(*FORWARDS), UNKNOWN)
    (one,) = wrong_slices(parse_hlo(text))
    assert one.wanted is None and one.operation.endswith("dynamic_slice")


def test_nothing_is_said_of_what_is_not_known_where_lines_are_right(trusted):
    assert not wrong_slices(parse_hlo(module(line(*FORWARDS), UNKNOWN)))
    # what is known is
    (one,) = wrong_slices(parse_hlo(module(line(*FORWARDS), BACKWARDS)))
    assert one.wanted == 7 * ROW


def test_a_deep_chain_of_data_is_not_followed(affected):
    """The index of a row that was computed, some thousand operations before."""
    text = module(line(*FORWARDS), "convert(%f.4999)")
    chain = "".join(f"  %f.{i + 1} = f32[] add(%f.{i}, %f.{i})\n" for i in range(5000))
    made = f"  %f.0 = f32[] convert(%r.0)\n{chain}"
    text = text.replace("  ROOT %found", f"{made}  ROOT %found")
    (one,) = wrong_slices(parse_hlo(text))
    assert one.wanted is None


def test_the_device_s_own_slices_are_not_looked_at():
    text = module(line(*FORWARDS), BACKWARDS).replace(":S(5)", "")
    assert not wrong_slices(parse_hlo(text))


# -- compiled


def loss(ws, x, body):
    return jnp.square(jax.lax.scan(body, x, ws)[0]).mean()


def layer(x, w):
    x = checkpoint_name(x, "input")
    return x + jnp.tanh(x @ w), None


def offloaded():
    """A gradient whose residuals a policy of JAX's sends away, and arguments."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["input"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    body = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    return jax.grad(partial(loss, body=body)), (shape(N, 256, 256), shape(4096, 256))


@needs_h100
def test_a_report_tells_of_a_policy_of_jax():
    """Of the versions in which XLA takes the index for the loop's counter."""
    step, args = offloaded()
    report = estimate(step, *args, target="h100")
    assert report.host_bytes == N * 4096 * 256 * 4
    assert bool(report.wrong_slices) == AFFECTED
    assert AFFECTED == any("WRONG VALUES" in note for note in report.notes)
    assert AFFECTED == (f"jax {jax.__version__} takes 1 slice" in str(report))
    for one in report.wrong_slices:  # the first iteration is the last layer's
        assert (one.iteration, one.offset) == (0, 0)
        assert one.wanted == (N - 1) * 4096 * 256 * 4
        assert "test_wrong_slices.py" in one.source
    assert MemoryReport.from_json(report.to_json()) == report


@needs_h100
def test_without_these_copies_nothing_is_wrong():
    step, args = offloaded()
    how = {"target": "h100", "compiler_options": {"xla_disable_hlo_passes": COPIES}}
    report = estimate(step, *args, **how)
    assert report.host_bytes and not report.wrong_slices
    assert not any("WRONG VALUES" in note for note in report.notes)
