"""Each fault that a module shows is found in it, and not in one with the way round."""

import pytest

import jaxmem
from jaxmem.faults import FAULTS, findings_in_module, standing
from jaxmem.memory.buffers import parse_hlo
from tests.faults import programs
from tests.memory.test_estimate import needs_h100, needs_tpu

BY_REPORT = {fault.report: fault for fault in FAULTS}

# A loop over parts of the examples; what is summed over the devices, and where.
SUM = """HloModule step, num_partitions=4

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%masked (t: f32[8,4], d: u32[]) -> f32[8,4] {
  %t = f32[8,4]{1,0} parameter(0)
  %d = u32[] parameter(1)
  %other = pred[] convert(%d)
  %others = pred[8,4]{1,0} broadcast(%other), dimensions={}
  %nothing = f32[] constant(0)
  %zeros = f32[8,4]{1,0} broadcast(%nothing), dimensions={}
  ROOT %own = f32[8,4]{1,0} select(%others, %zeros, %t), metadata={op_name="OPERATION"}
}

%body (carry: (s32[], f32[8,4], s32[2], f32[2,4])) -> (s32[], f32[8,4], s32[2], f32[2,4]) {
  %carry = (s32[], f32[8,4]{1,0}, s32[2], f32[2,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %total = f32[8,4]{1,0} get-tuple-element(%carry), index=1
  %ids = s32[2] get-tuple-element(%carry), index=2
  %rows = f32[2,4]{1,0} get-tuple-element(%carry), index=3
  %device = u32[] partition-id()
  %kept = f32[8,4]{1,0} fusion(%total, %device), kind=kLoop, calls=%masked
  %added = f32[8,4]{1,0} scatter(%kept, %ids, %rows), to_apply=%sum
  INSIDE
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %left = (s32[], f32[8,4]{1,0}, s32[2], f32[2,4]{1,0}) tuple(%next, %new, %ids, %rows)
}

%goes_on (c: (s32[], f32[8,4], s32[2], f32[2,4])) -> pred[] {
  %c = (s32[], f32[8,4]{1,0}, s32[2], f32[2,4]{1,0}) parameter(0)
  ROOT %known = pred[] constant(true)
}

ENTRY %main (start: (s32[], f32[8,4], s32[2], f32[2,4])) -> f32[8,4] {
  %start = (s32[], f32[8,4]{1,0}, s32[2], f32[2,4]{1,0}) parameter(0)
  %loop = (s32[], f32[8,4]{1,0}, s32[2], f32[2,4]{1,0}) while(%start), condition=%goes_on, body=%body
  %last = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  ROOT %all = f32[8,4]{1,0} BEHIND
}
"""  # noqa: E501
ALL_REDUCE = "all-reduce(%X), replica_groups={{0,1,2,3}}, to_apply=%sum"
COPY = "copy(%X)"


def sum_of_tables(inside: str, behind: str, operation="jit(step)/while/scatter-add"):
    new = f"%new = f32[8,4]{{1,0}} {inside.replace('X', 'added')}"
    text = SUM.replace("INSIDE", new).replace("BEHIND", behind.replace("X", "last"))
    return text.replace("OPERATION", operation)


# The rows of a table's gradient, of which each device keeps a quarter.
ROWS = """HloModule step, num_partitions=4

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (zeros: f32[8,4], ids: s32[2], rows: f32[2,4]) -> f32[2,4] {
  %zeros = f32[8,4]{1,0} parameter(0)
  %ids = s32[2] parameter(1)
  %rows = f32[2,4]{1,0} parameter(2)
  %added = f32[8,4]{1,0} scatter(%zeros, %ids, %rows), to_apply=%sum
  %device = u32[] partition-id()
  %starts = s32[4] constant({0, 2, 4, 6})
  %start = s32[1] dynamic-slice(%starts, %device), dynamic_slice_sizes={1}
  %at = s32[] reshape(%start)
  %zero = s32[] constant(0)
ORDER
}
"""
CUT_FIRST = """  %own = f32[2,4]{1,0} dynamic-slice(%added, %at, %zero), dynamic_slice_sizes={2,4}
  ROOT %all = f32[2,4]{1,0} all-reduce(%own), replica_groups={{0,1,2,3}}, to_apply=%sum
"""  # noqa: E501
SUMMED_FIRST = """  %all = f32[8,4]{1,0} all-reduce(%added), to_apply=%sum
  ROOT %own = f32[2,4]{1,0} dynamic-slice(%all, %at, %zero), dynamic_slice_sizes={2,4}
"""


def found_in(text: str) -> set[str]:
    return {one.fault.report for one in findings_in_module(parse_hlo(text), FAULTS)}


def test_sums_behind_the_loop():
    assert found_in(sum_of_tables(COPY, ALL_REDUCE)) == {"xla#49143"}


@pytest.mark.parametrize(
    "text",
    [
        sum_of_tables(ALL_REDUCE, COPY),
        # what a user's own function does on one device alone
        sum_of_tables(COPY, ALL_REDUCE, "jit(step)/while/select_n"),
        # the sum is another one
        sum_of_tables(COPY, ALL_REDUCE).replace("fusion(%total,", "fusion(%other,"),
    ],
    ids=["in the loop", "of the user's", "of another array"],
)
def test_sums_that_are_right(text):
    assert not found_in(text)


def test_rows_cut_before_the_sum():
    assert found_in(ROWS.replace("ORDER", CUT_FIRST)) == {"xla#42481"}
    assert not found_in(ROWS.replace("ORDER", SUMMED_FIRST))


def lint_of(case, target):
    return jaxmem.lint(case.step, *case.args, target=target)


def reports_in(case, target) -> set[str]:
    """The rows of the table that `lint` and `audit` find in what is compiled."""
    linted = lint_of(case, target).of("known fault")
    rows = (f for f in FAULTS if any(f.address in one.what for one in linted))
    found = {fault.report for fault in rows}
    audited = jaxmem.audit(case.step, *case.args, target=target)
    told = {one.report for one in audited if one.report}
    assert {BY_REPORT[r].address for r in found} == told
    return found


def has(report, platform):
    return standing(BY_REPORT[report], platform) == "affected"


def test_moved_rows_on_the_cpu():
    told = {"xla#49176"} if has("xla#49176", "cpu") else set()
    assert reports_in(programs.MOVED, "cpu") == told
    assert not reports_in(programs.JOINED, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "platform"),
    [
        pytest.param("h100", "cuda", marks=needs_h100),
        pytest.param("tpu-v5e", "tpu", marks=needs_tpu),
    ],
)
def test_compiled_sums_of_tables(target, platform):
    mesh = jaxmem.target_mesh(target, (4,), ("data",))
    told = {"xla#49143"} if has("xla#49143", platform) else set()
    assert reports_in(programs.summed_tables(mesh), target) == told
    assert reports_in(programs.summed_tables(mesh, direct=True), target) == told
    assert not reports_in(programs.summed_tables(mesh, apart=True), target)
    # the option of the row is one that this compiler takes
    case, options = programs.summed_tables(mesh), BY_REPORT["xla#49143"].options
    how = {"target": target, "compiler_options": dict(options)}
    report = jaxmem.estimate(case.step, *case.args, **how)
    sent = {one.kind: one.times for one in report.collectives}
    assert sent["all-reduce"] == programs.PARTS  # in each iteration, as it must be


@needs_h100
@pytest.mark.slow
def test_compiled_for_a_gpu():
    mesh = jaxmem.target_mesh("h100", (4,), ("data",))
    assert reports_in(programs.with_margins(mesh), "h100") == {"jax#39100"}
    assert not reports_in(programs.with_margins(mesh, apart=True), "h100")
    assert reports_in(programs.rolled_update(), "h100") == {"xla#49119"}
    assert not reports_in(programs.rolled_update(apart=True), "h100")


@needs_h100
@pytest.mark.slow
def test_what_does_not_compile():
    case = programs.looked_up(1)
    report = lint_of(case, "h100")
    (found,) = report.of("known fault")
    assert BY_REPORT["xla#49299"].address in found.what
    assert "programs.py" in found.where
    assert any("not compiled" in line for line in report.skipped)
    for clean in (programs.searched_first(), programs.looked_up(1, "compare_all")):
        assert not lint_of(clean, "h100").of("known fault")


@needs_h100
@pytest.mark.slow
def test_the_bytes_of_a_donated_array():
    """By the compiler for a GPU, as test_runs.py has it by that for CPUs."""
    size = 4 * programs.SIZE
    peak = lambda case: (
        jaxmem.estimate(
            case.step, *case.args, target="h100", donate_argnums=0
        ).peak_bytes
    )
    copied = has("xla#45912", "cuda")
    assert (peak(programs.BETWEEN) >= 2 * size) == copied
    assert peak(programs.BEFORE_LOOP) < 2 * size
