"""Seconds of a module: bytes, launches, loops, branches, copies beside kernels."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from jaxmem._checks import from_plain
from jaxmem._module_path import parse_op_name, share_taken, taken_in
from jaxmem.chips import CHIPS, is_timed, rates_of
from jaxmem.memory.buffers import parse_hlo
from jaxmem.memory.time.schedule import timed, total
from jaxmem.memory.time.step_time import StepTime, step_time
from tests.memory.time import modules

H100 = rates_of("h100")
MIB = 2**20
# 64 MiB in, 64 MiB out
ADD = "%{name} = f32[16777216]{{0}} add(%{of}, %{of})"
START = "%a = f32[16777216]{0} parameter(0)"


def of_text(entry, *computations, **how):
    return timed(parse_hlo(modules.text(entry, *computations)), H100, **how)


def add(name, of):
    return ADD.format(name=name, of=of)


def test_a_kernel_takes_its_bytes_at_the_bandwidth():
    found = of_text(f"{START}\nROOT {add('b', 'a')}")
    (kernel,) = found.kernels
    assert kernel.bytes == 3 * 64 * MIB and kernel.bound == "memory"
    expected = H100.launch + kernel.bytes / H100.bandwidth
    assert kernel.seconds == pytest.approx(expected)


def test_what_the_cache_still_holds_is_read_faster():
    small = "%a = f32[262144]{0} parameter(0)\n"
    lines = [
        f"%x{i} = f32[262144]{{0}} negate(%{f'x{i - 1}' if i else 'a'})"
        for i in range(3)
    ]
    rates = dataclasses.replace(H100, launch=0.0)
    hlo = parse_hlo(modules.text(small + "\n".join(lines)))
    first, second, _ = (k.seconds for k in timed(hlo, rates).kernels)
    assert first == pytest.approx(2 * MIB / rates.bandwidth)
    assert second == pytest.approx(MIB / rates.bandwidth + MIB / rates.cached)


def test_a_small_kernel_takes_a_launch():
    found = of_text("%a = f32[8]{0} parameter(0)\nROOT %b = f32[8]{0} negate(%a)")
    (kernel,) = found.kernels
    moved = 2 * 8 * 4 / H100.bandwidth
    assert kernel.seconds == pytest.approx(H100.launch + moved)
    assert kernel.bound == "launch"


def test_loops_count_by_their_trips():
    def step(x):
        return jax.lax.fori_loop(0, 7, lambda _, x: jnp.sin(x) + 1, x)

    hlo = modules.compiled(step, jnp.ones((512, 512)))
    in_loop = [k for k in timed(hlo, H100).kernels if k.bytes >= 2 * MIB]
    assert 7.0 in {k.times for k in in_loop} <= {1.0, 7.0}


LOOP = modules.computation(
    "body",
    "%p = (f32[16777216]{0}) parameter(0)\n"
    "%g = f32[16777216]{0} get-tuple-element(%p), index=0\n"
    f"{add('n', 'g')}\nROOT %t = (f32[16777216]{{0}}) tuple(%n)",
) + modules.computation(
    "cond",
    "%q = (f32[16777216]{0}) parameter(0)\nROOT %c = pred[] custom-call(%q)",
)
WHILE = (
    f"{START}\n%t0 = (f32[16777216]{{0}}) tuple(%a)\n"
    "ROOT %w = (f32[16777216]{0}) while(%t0), condition=%cond, body=%body"
)


def test_unknown_trips_are_said_and_can_be_given():
    once = of_text(WHILE, LOOP)
    assert once.unknown_trips == ["w"]
    five = of_text(WHILE, LOOP, trip_count=5)
    assert total(five.kernels) == pytest.approx(5 * total(once.kernels))
    notes = step_time(modules.text(WHILE, LOOP), "h100").notes
    assert any("trips=" in note for note in notes)


def test_of_branches_the_longest_counts():
    short = modules.computation("short", "ROOT %s = f32[16777216]{0} parameter(0)")
    long = modules.computation(
        "long", f"%l = f32[16777216]{{0}} parameter(0)\nROOT {add('m', 'l')}"
    )
    entry = (
        f"{START}\n%i = s32[] constant(0)\n"
        "ROOT %c = f32[16777216]{0} conditional(%i, %a, %a), "
        "branch_computations={%short, %long}"
    )
    found = of_text(entry, short, long)
    # before it, the host is told which one it is
    assert [k.name for k in found.kernels] == ["c", "m"]
    assert found.kernels[0].seconds == H100.branch


@pytest.mark.parametrize(
    ("branches", "often"),
    [
        ("branch_computations={%rest, %taken}", 0.25),
        ("true_computation=%taken, false_computation=%rest", 0.25),
        ("true_computation=%rest, false_computation=%taken", 0.75),
    ],
)
def test_of_a_cond_that_a_schedule_has_made_each_branch_counts(branches, often):
    """The true one in as many layers as its name scope says."""
    body = "%{0}0 = f32[16777216]{{0}} parameter(0)\nROOT "
    taken = modules.computation("taken", body.format("t") + add("long", "t0"))
    rest = modules.computation("rest", body.format("r") + add("short", "r0"))
    scope = f"jit(f)/while/body/{taken_in(6, 24)}/cond"
    entry = (
        f"{START}\n%i = s32[] constant(0)\n"
        f"ROOT %c = f32[16777216]{{0}} conditional(%i, %a, %a), {branches}, "
        f'metadata={{op_name="{scope}"}}'
    )
    times = {k.name: k.times for k in of_text(entry, taken, rest).kernels}
    assert times == {"c": 1, "long": often, "short": 1 - often}


def test_a_scope_that_says_how_often_is_no_module():
    scope = f"{taken_in(6, 24)}/cond/branch_1_fun"
    found = parse_op_name(f"jit(f)/Net/while/body/{scope}/add")
    assert (found.module_path, found.operation) == ("Net", "add")
    assert share_taken("jit(f)/cond") is None


COPY = (
    f"{START}\n%h = f32[16777216]{{0:S(5)}} parameter(1)\n"
    "%s = (f32[16777216]{0}, f32[16777216]{0:S(5)}, u32[]) copy-start(%h)\n"
    "{between}"
    "ROOT %d = f32[16777216]{0} copy-done(%s)"
)


@pytest.mark.parametrize("kernels", [0, 1, 40])
def test_a_copy_runs_beside_kernels_and_the_rest_is_waited_for(kernels):
    between = "".join(
        add(f"k{i}", f"k{i - 1}" if i else "a") + "\n" for i in range(kernels)
    )
    found = of_text(COPY.replace("{between}", between))
    alone = H100.launch + 64 * MIB / H100.host
    beside = sum(k.seconds for k in found.kernels if k.name.startswith("k"))
    assert total(found.kernels) == pytest.approx(max(alone, beside))


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_update_of_a_stack_on_the_host_moves_what_is_updated(wrapped):
    stack, row = "f32[24,16777216]{1,0:S(5)}", "f32[1,16777216]{1,0}"
    update = modules.computation(
        "f",
        f"%p0 = {stack} parameter(0)\n%p1 = {row} parameter(1)\n"
        "%p2 = s32[] parameter(2)\n%z = s32[] constant(0)\n"
        f"ROOT %u = {stack} dynamic-update-slice(%p0, %p1, %p2, %z)",
    )
    around = modules.computation(
        "g",
        f"%q0 = {stack} parameter(0)\n%q1 = {row} parameter(1)\n"
        "%q2 = s32[] parameter(2)\n"
        f"ROOT %w = {stack} fusion(%q0, %q1, %q2), kind=kLoop, calls=%f",
    )
    start = f"(({stack}, {row}, s32[]), {stack}, u32[]) async-start(%h, %r, %i)"
    entry = (
        f"%h = {stack} parameter(0)\n%r = {row} parameter(1)\n%i = s32[] parameter(2)\n"
    )
    if wrapped:
        entry += f"%s = {start}, calls=%g\nROOT %d = {stack} async-done(%s)"
    else:
        entry += f"ROOT %d = {stack} fusion(%h, %r, %i), kind=kLoop, calls=%f"
    found = of_text(entry, update, around)
    alone = H100.launch + 64 * MIB / H100.host
    assert total(found.kernels) == pytest.approx(alone, rel=0.01)


SLICE = modules.computation(
    "f",
    "%p0 = f32[24,16777216]{1,0} parameter(0)\n%p1 = s32[] parameter(1)\n"
    "%z = s32[] constant(0)\n"
    "ROOT %s = f32[1,16777216]{1,0} dynamic-slice(%p0, %p1, %z), "
    "dynamic_slice_sizes={1,16777216}",
)


def test_a_slice_that_xla_starts_takes_the_bandwidth_of_the_kernels_beside_it():
    entry = (
        "%x = f32[24,16777216]{1,0} parameter(0)\n%i = s32[] parameter(1)\n"
        "%c = ((f32[24,16777216]{1,0}, s32[]), f32[1,16777216]{1,0}, u32[]) "
        "fusion-start(%x, %i), kind=kLoop, calls=%f\n"
        f"{START.replace('parameter(0)', 'parameter(2)')}\n{add('b', 'a')}\n"
        "ROOT %d = f32[1,16777216]{1,0} fusion-done(%c)"
    )
    copied, added = of_text(entry, SLICE).kernels
    assert copied.bytes == 2 * 64 * MIB + 4
    alone = H100.launch + copied.bytes / H100.bandwidth
    assert copied.seconds == pytest.approx(alone)
    assert added.seconds > H100.launch


@pytest.mark.parametrize("workspace", [1, MIB])
def test_the_workspace_of_a_library_counts_for_nothing(workspace):
    entry = (
        "%a = f32[16,16]{1,0} parameter(0)\n"
        f"ROOT %c = (f32[16,16]{{1,0}}, s8[{workspace}]{{0}}) custom-call(%a, %a), "
        'custom_call_target="__cublas$gemm", backend_config='
        '{"lhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[]}'
    )
    (kernel,) = of_text(entry).kernels
    assert kernel.bytes == 3 * 16 * 16 * 4


def test_an_update_in_place_costs_what_is_updated():
    def step(x, row):
        return jax.lax.dynamic_update_slice(x, row, (3, 0))

    text = modules.text(
        "%x = f32[4096,4096]{1,0} parameter(0)\n%r = f32[1,4096]{1,0} parameter(1)\n"
        "%i = s32[] parameter(2)\n"
        "ROOT %u = f32[4096,4096]{1,0} dynamic-update-slice(%x, %r, %i, %i)"
    )
    (kernel,) = timed(parse_hlo(text), H100).kernels
    assert kernel.bytes == 2 * 4096 * 4 + 2 * 4  # read and written, and two indices


def test_a_fusion_reads_a_slice_of_a_stack_as_the_slice():
    inside = modules.computation(
        "f",
        "%p0 = f32[24,1024]{1,0} parameter(0)\n%p1 = s32[] parameter(1)\n"
        "%z = s32[] constant(0)\n"
        "%s = f32[1,1024]{1,0} dynamic-slice(%p0, %p1, %z), "
        "dynamic_slice_sizes={1,1024}\nROOT %n = f32[1,1024]{1,0} negate(%s)",
    )
    entry = (
        "%x = f32[24,1024]{1,0} parameter(0)\n%i = s32[] parameter(1)\n"
        "ROOT %f1 = f32[1,1024]{1,0} fusion(%x, %i), kind=kLoop, calls=%f"
    )
    (kernel,) = of_text(entry, inside).kernels
    assert kernel.bytes == 2 * 4096 + 4


def test_what_is_cast_is_read_as_far_as_its_slice():
    inside = modules.computation(
        "f",
        "%p0 = bf16[24,1024]{1,0} parameter(0)\n"
        "%c = f32[24,1024]{1,0} convert(%p0)\n"
        "%b = f32[1,24,1024]{2,1,0} bitcast(%c)\n"
        "%s = f32[1,1,1]{2,1,0} slice(%b), slice={[0:1], [0:1], [0:1]}\n"
        "ROOT %n = f32[1,1,1]{2,1,0} negate(%s)",
    )
    entry = (
        "%x = bf16[24,1024]{1,0} parameter(0)\n"
        "ROOT %f1 = f32[1,1,1]{2,1,0} fusion(%x), kind=kLoop, calls=%f"
    )
    (kernel,) = of_text(entry, inside).kernels
    assert kernel.bytes == 2 * 4


def test_a_custom_call_without_a_cost_is_named():
    entry = f'{START}\nROOT %c = f32[4]{{0}} custom-call(%a), custom_call_target="mine"'
    found = step_time(modules.text(entry), "h100")
    assert found is not None and any("custom calls" in note for note in found.notes)


@pytest.fixture(scope="module")
def mlp_time():
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    args = jnp.ones((256, 256)), jnp.ones((512, 256))
    text = jax.jit(jax.grad(loss)).lower(*args).compile().as_text()
    return step_time(text, "a100")


def test_shares_add_up(mlp_time):
    assert isinstance(mlp_time, StepTime)
    for rows in (mlp_time.by_bound, mlp_time.by_module):
        assert sum(s for _, s in rows) == pytest.approx(mlp_time.seconds)
    assert sum(o.seconds for o in mlp_time.operations) == pytest.approx(
        mlp_time.seconds
    )
    assert mlp_time.flops == 2 * 2 * 512 * 256 * 256  # two products
    assert 0 < mlp_time.hfu < 1
    assert mlp_time.mfu == mlp_time.hfu  # nothing is recomputed


def test_json_round_trip(mlp_time):
    plain = json.loads(json.dumps(dataclasses.asdict(mlp_time)))
    assert from_plain(StepTime, plain, "time") == mlp_time


@pytest.mark.parametrize("target", CHIPS)
def test_each_chip_has_rates_and_each_but_the_host_is_timed(target):
    rates, machine = rates_of(target), CHIPS[target].machine
    assert is_timed(target) == (target != "cpu")
    assert 0.5 * machine.narrow < rates.narrow <= machine.narrow
    assert 0 < rates.bandwidth <= machine.bandwidth


def test_a_chip_without_rates_has_no_time():
    assert step_time(modules.text(START), "cpu") is None
