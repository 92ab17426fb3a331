"""Slices of the host's arrays: where they are taken from, and where that is wrong."""

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


def test_what_an_index_is_made_of_may_not_be_known():
    text = module(line(*FORWARDS), "custom-call(%r.0), custom_call_target=foo")
    (one,) = wrong_slices(parse_hlo(text))
    assert one.wanted is None and one.operation.endswith("dynamic_slice")


def test_a_deep_chain_of_data_is_not_followed():
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
