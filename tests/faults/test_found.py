"""Each row of the table is found in a program that has it, and not with the way round.

On versions of jax that have the fault, as the table says: the others are not told.
"""

import jax
import pytest

import jaxmem
from jaxmem import faults
from jaxmem.faults import FAULTS, TracedProgram, findings_in_program, versions
from jaxmem.frameworks import pure_call
from jaxmem.ir import jaxprs
from jaxmem.memory.compile import traced_call
from tests.faults import programs
from tests.programs import PROGRAMS

CHECK = "known fault"
BIAS = (1, 4, 128, 128)
BY_REPORT = {fault.report: fault for fault in FAULTS}


def mesh(axis="data", n=4):
    return jaxmem.target_mesh("h100", (n,), (axis,))


def scattered_sums(size):
    return programs.parts_of_sums(jax.make_mesh((4,), ("data",)), size)


def bias(dtype, batch=1):
    return jax.ShapeDtypeStruct((batch, *BIAS[1:]), dtype)


# report -> programs that have the fault, and others with the way round
CASES = {
    "xla#49143": (
        [
            lambda: programs.summed_tables(mesh()),
            lambda: programs.summed_tables(mesh(), direct=True),
        ],
        [
            lambda: programs.summed_tables(mesh(), apart=True),
            lambda: programs.summed_tables(mesh(n=1)),
        ],
    ),
    "jax#40101": (
        [lambda: programs.NUMBERS, lambda: programs.STACKED],
        [lambda: programs.WIDE_ROWS],
    ),
    "xla#45912": ([lambda: programs.BETWEEN], [lambda: programs.BEFORE_LOOP]),
    "jax#39025": ([lambda: programs.EAGER], [lambda: programs.IN_JIT]),
    "xla#49299": (
        [lambda: programs.looked_up(1)],
        [
            lambda: programs.looked_up(2),
            lambda: programs.looked_up(1, "compare_all"),
            programs.searched_first,
        ],
    ),
    "jax#40830": (
        [lambda: scattered_sums(2**20)],
        [lambda: scattered_sums(2**16)],
    ),
}
# those of cuDNN's attention, which is traced for a GPU alone
ATTENTION = {
    "jax#32242": (
        lambda: programs.attended(bias=bias(programs.F32)),
        lambda: programs.attended(bias=bias(programs.BF16)),
    ),
    "jax#30593": (
        lambda: programs.attended(bias=bias(programs.BF16, 2), by=1),
        lambda: programs.attended(bias=bias(programs.BF16), by=1),
    ),
    "jax#23701": (
        lambda: programs.attended(heads=48),
        lambda: programs.attended(heads=64),
    ),
}


def affected(of_version, report):
    """Believes a version that has the fault."""
    first, last = BY_REPORT[report].affected
    of_version(*(last or first or BY_REPORT[report].looked_at[-1]))


def told(case, target=None):
    found = jaxmem.lint(*case[:1], *case.args, donate_argnums=case.donate).of(CHECK)
    return [f for f in found if f.severity in ("error", "warning")]


@pytest.fixture
def joined(monkeypatch):
    monkeypatch.setattr(faults, "processes_are_joined", lambda: True)


@pytest.mark.parametrize("report", CASES)
def test_of_a_traced_program(report, of_version, joined):
    affected(of_version, report)
    hit, clean = CASES[report]
    for make in hit:
        found = told(make())
        assert len(found) == 1 and BY_REPORT[report].address in found[0].what
        assert found[0].what.startswith("on a ") and "programs.py" in found[0].where
        assert BY_REPORT[report].way_round in found[0].remedy
    for make in clean:
        assert not told(make())


@pytest.mark.parametrize("report", CASES)
def test_of_versions_without_it(report, of_version, joined):
    fault = BY_REPORT[report]
    free = [v for v in fault.looked_at if not _has(fault, v)]
    for version in free:
        of_version(*version)
        assert not any(map(told, (make() for make in CASES[report][0])))
    assert free or fault.affected == (None, None)


def _has(fault, version):
    of = (versions.standing(fault, p, version) for p in fault.platforms)
    return "affected" in of


def test_sums_of_one_process(of_version):
    """They do not go through gloo."""
    affected(of_version, "jax#40830")
    assert not told(scattered_sums(2**20))


def in_attention(case, report):
    """What the row's finder finds, of a step that is traced for an H100."""
    with jaxmem.chips.traced_for(jaxmem.chips.get_target("h100", check=False)):
        closed = jax.make_jaxpr(case.step)(*case.args)
    return list(findings_in_program(TracedProgram(closed), [BY_REPORT[report]]))


@pytest.mark.parametrize("report", ATTENTION)
def test_of_attention(report):
    hit, clean = ATTENTION[report]
    found = in_attention(hit(), report)
    assert [one.fault.report for one in found] == [report]
    assert not in_attention(clean(), report)


def without_its_gradient(closed):
    """The jaxpr with a backward pass that leaves out the bias, as old versions'."""
    for eqn in jaxprs.walk(closed):
        if "bwd_wrapper" in eqn.primitive.name:
            eqn.params["variadic_args"] = (True, False)
    return closed


def test_of_a_bias_without_gradient():
    case = programs.attended(bias=bias(programs.BF16))
    row = [BY_REPORT["jax#27184"]]
    with jaxmem.chips.traced_for(jaxmem.chips.get_target("h100", check=False)):
        closed = jax.make_jaxpr(case.step)(*case.args)
    assert not list(findings_in_program(TracedProgram(closed), row))
    closed = without_its_gradient(closed)
    assert len(list(findings_in_program(TracedProgram(closed), row))) == 1


def test_of_a_function_of_the_scores(monkeypatch):
    case = programs.attended()
    row = [BY_REPORT["jax#38486"]]
    with jaxmem.chips.traced_for(jaxmem.chips.get_target("h100", check=False)):
        closed = jax.make_jaxpr(case.step)(*case.args)
    for eqn in jaxprs.walk(closed):
        if "fwd_wrapper" in eqn.primitive.name:
            eqn.params["score_mod"] = lambda scores: scores * 2
    for version, count in ((91002, 1), (91300, 0), (None, 0)):
        have = lambda version=version: version
        monkeypatch.setattr("jaxmem._compat.cudnn_version", have)
        assert len(list(findings_in_program(TracedProgram(closed), row))) == count


def test_an_error_that_is_known_says_so():
    """A mask alone is refused when the step is traced."""
    case = programs.attended(mask=(2, 1, 1, 128))
    with pytest.raises(ValueError, match="same seq length") as caught:
        jaxmem.lint(case.step, *case.args, target="h100")
    (note,) = caught.value.__notes__
    row = BY_REPORT["jax#28974"]
    assert row.address in note and row.way_round in note
    whole = programs.attended(mask=(2, 1, 128, 128))
    assert not in_attention(whole, "jax#28974")
    assert faults.of_error("out of memory") is None


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_nothing_is_found_in_the_zoo(program):
    """By any finder, whatever the version and the platform."""
    step, args, donate = program.make("small")
    with pure_call(step, args, {}, donate or None, ()) as pure:
        made = traced_call(step, pure)
    call, traced = made.call, made.traced
    donated = frozenset(i for i, leaf in enumerate(call.leaves) if leaf.donated)
    assert bool(donated) == bool(donate)
    whole = TracedProgram(traced.jaxpr, donated, devices=8, distributed=True)
    assert not list(findings_in_program(whole, FAULTS))


def test_every_row_has_a_finder_and_a_program():
    """Of modules: test_modules.py; elsewhere: the tests of those rules."""
    for fault in FAULTS:
        tested = fault.report in {*CASES, *ATTENTION}
        others = {"jax#28974", "jax#27184", "jax#38486"}
        assert tested or fault.report in others or fault.in_module or fault.elsewhere
        finder = fault.in_program or fault.in_module
        assert finder or fault.elsewhere or fault.error
    assert len({f.report for f in FAULTS}) == len(FAULTS)
