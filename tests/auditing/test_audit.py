"""The audit: faults written into the text of compiled modules, and modules without."""

import json
import random
import re

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.auditing._audit import audit_texts
from jaxmem.auditing._module import Module
from jaxmem.memory import CompileError
from jaxmem.memory.buffers.assignment import parse_live_range
from tests.auditing.steps import STEPS, dump
from tests.memory.test_estimate import needs_h100
from tests.memory.test_wrong_slices import BACKWARDS, ROW, line, module
from tests.programs import PROGRAMS

TRIES = 100


def texts(name):
    return dump(name)["hlo"], dump(name)["buffer_assignment"]


def rules_of(hlo, assignment):
    return {finding.rule for finding in audit_texts(hlo, assignment)}


def line_of(assignment, value):
    index = "{" + ",".join(map(str, value.index)) + "}" if value.index else ""
    name = re.escape(value.name + index)
    form = rf"^ value: <\d+ {name}(?: \(phi\))? @\d+> \(size=.*$"
    return re.search(form, assignment, re.MULTILINE).group()


def moved_onto(assignment, value, other):
    """The assignment with a value at the place of another one."""
    line, at = line_of(assignment, value), line_of(assignment, other)
    without = assignment.replace(line + "\n", "", 1)
    moved = re.sub(r"offset=\d+", f"offset={other.offset}", line)
    return without.replace(at + "\n", f"{at}\n{moved}\n", 1)


def values_of(module, kinds=("temp", "output", "parameter")):
    return [v for a in module.allocations if a.kind in kinds for v in module.data(a)]


@pytest.mark.parametrize("name", STEPS)
def test_nothing_is_found_in_what_is_right(name):
    hlo, assignment = texts(name)
    module = Module(hlo, assignment)
    values = values_of(module)
    assert values and all(module.lives.alive(v.key) for v in values)
    assert audit_texts(hlo, assignment) == ()


def test_two_values_moved_onto_each_other():
    draw = random.Random(0)
    pairs = [(name, *pair) for name in STEPS for pair in _alive_together(name)]
    assert len(pairs) >= TRIES
    for name, a, b in draw.sample(pairs, TRIES):
        hlo, assignment = texts(name)
        found = rules_of(hlo, moved_onto(assignment, a, b))
        assert found & {"shared_bytes", "read_after_update", "two_outputs"}, (a, b)


def _alive_together(name):
    """Pairs alive together for two steps and more, by the compiler's own count."""
    hlo, assignment = texts(name)
    module = Module(hlo, assignment)
    ranges = parse_live_range(dump(name)["live_range"]).ranges
    made = [v for v in values_of(module) if v.key in ranges and _is_made(module, v)]
    for a in made:
        for b in made:
            start = max(ranges[a.key][0], ranges[b.key][0])
            end = min(ranges[a.key][1], ranges[b.key][1])
            if module.slot(a) < module.slot(b) and end - start >= 2:
                yield a, b


def _is_made(module, value):
    """Whether an instruction that is no bitcast reads it after it is made."""
    if any(
        " conditional(" in module.hlo.lines[reader][1]
        for reader in module.hlo.readers[value.name]
    ):
        return False  # nobody reads what chooses a branch once it runs
    uses = module.lives.uses.get(value.key, ())
    return any(use > module.lives.position[value.name] for use in uses)


def test_two_outputs_of_one_fusion_in_one_buffer():
    draw = random.Random(1)
    pairs = [
        (name, a, b)
        for name in STEPS
        for module in [Module(*texts(name))]
        for a in values_of(module)
        for b in values_of(module)
        if a.name == b.name and a.index < b.index
        if module.hlo.instruction(a.name).opcode not in ("parameter", "while")
    ]
    assert pairs
    for name, a, b in draw.choices(pairs, k=TRIES):
        hlo, assignment = texts(name)
        assert "two_outputs" in rules_of(hlo, moved_onto(assignment, b, a))


def test_a_read_after_the_update():
    draw = random.Random(2)
    found = [(name, *pair) for name in STEPS for pair in _updates(name)]
    assert found
    for name, old, new in draw.choices(found, k=TRIES):
        hlo, assignment = texts(name)
        line = re.search(rf"^  (?:ROOT )?%?{re.escape(new)} = .*$", hlo, re.M).group()
        late = f"  %late = {old.shape} negate(%{old.name})"
        changed = hlo.replace(f"{line}\n", f"{line}\n{late}\n", 1)
        assert "read_after_update" in rules_of(changed, assignment), (old, new)


def _updates(name):
    module = Module(*texts(name))
    for old in values_of(module):
        for new in values_of(module):
            same = (module.slot(old), old.size) == (module.slot(new), new.size)
            if same and not old.index and old.key in module.operands(new.name):
                if module.hlo.instruction(new.name).opcode != "while":
                    yield old, new.name


@pytest.mark.parametrize("fault", ["dropped", "doubled"])
def test_an_alias_dropped_or_doubled(fault):
    draw = random.Random(3)
    aliased = [name for name in STEPS if "input_output_alias" in texts(name)[0]]
    several = [n for n in aliased if len(Module(*texts(n)).aliases) > 1]
    for _ in range(TRIES):
        hlo, assignment = texts(draw.choice(several))
        pairs = re.findall(r"\{[\d, ]*\}: \(\d+, \{\}, [\w-]+\)", hlo)
        one, other = draw.sample(pairs, 2)
        number = re.search(r"\((\d+),", other).group(1)
        new = re.sub(r"\(\d+,", f"({number},", one) if fault == "doubled" else ""
        assert "donations" in rules_of(hlo.replace(one, new, 1), assignment)


def test_a_fusion_that_reads_elsewhere_what_it_updates():
    hlo, assignment = texts("stack")
    module = Module(hlo, assignment)
    update = next(
        one
        for name in module.hlo.lines
        for one in [module.hlo.instruction(name)]
        if one.opcode == "dynamic-update-slice"
        and module.hlo.instruction(one.operands[0]).opcode == "parameter"
        and one.computation in module.hlo.callers
        and module.hlo.instruction(module.hlo.callers[one.computation]).opcode
        == "fusion"
    )
    parameter = update.operands[0]
    line = re.search(rf"^  %?{re.escape(parameter)} = .*$", hlo, re.M).group()
    draw = random.Random(4)
    for _ in range(TRIES):
        start = draw.randrange(8)
        read = draw.choice(
            (
                f"slice(%{parameter}), slice={{[{start}:{start + 1}], [0:64]}}",
                f"reverse(%{parameter}), dimensions={{{draw.randrange(3)}}}",
                f"transpose(%{parameter}), dimensions={{0,2,1}}",
                f"dynamic-slice(%{parameter}, %elsewhere, %elsewhere, %elsewhere)",
            )
        )
        late = f"  %shifted = f32[1,64,32] {read}"
        changed = hlo.replace(f"{line}\n", f"{line}\n{late}\n", 1)
        (found,) = audit_texts(changed, assignment)
        assert found.rule == "read_elsewhere" and "49176" in found.report, read


def test_slices_of_the_host_along_another_line():
    """Of a backward loop over rows: an index reversed, or off."""
    draw = random.Random(5)
    right = (7 * ROW, -ROW)
    for _ in range(TRIES):
        inside, written = draw.random() < 0.5, draw.random() < 0.5
        wrong = draw.choice(
            ((0, ROW), (ROW * draw.randrange(7), -ROW), (7 * ROW, -2 * ROW))
        )
        for walked in (right, wrong):
            text = module(line(*walked, inside), BACKWARDS, written=written)
            found = {finding.rule for finding in audit_texts(text, "")}
            assert found == ({"host_slices"} if walked == wrong else set()), walked


def test_of_a_step():
    step, arguments, donate = STEPS["layers"]
    report = jaxmem.audit(step, *arguments(), donate_argnums=donate)
    assert not len(report) and str(report) == "update for cpu: no findings"
    assert json.loads(report.to_json())["findings"] == []


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", pytest.param("h100", marks=needs_h100)])
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
@pytest.mark.usefixtures("standard_jax")
def test_nothing_is_found_in_programs(program, target):
    step, args, donate = program.make("small")
    try:
        report = jaxmem.audit(step, *args, target=target, donate_argnums=donate)
    except CompileError as error:  # XLA tiles no products as small as some adapters'
        if "Couldn't find output tile sizes" not in str(error):
            raise
        pytest.skip("this version of XLA does not compile it in small")
    assert not report.skipped and not report.findings


@needs_h100
def test_a_step_with_attention_of_a_gpu_that_is_absent():
    """It is traced for the target, as by `estimate`."""

    def step(q):
        attend = jax.nn.dot_product_attention
        loss = lambda q: jnp.sum(attend(q, q, q, implementation="cudnn") ** 2)
        return jax.grad(loss)(q)

    q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    assert not len(jaxmem.audit(step, q, target="h100"))
