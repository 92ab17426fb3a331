"""Sums over devices: right ones of many shardings, and faults written into them."""

import functools
import random
import re

import pytest

import jaxmem
from jaxmem.auditing._audit import audit_texts
from jaxmem.auditing._module import Module
from jaxmem.memory.buffers.device_groups import groups_of, shards_of, sources_of
from tests.auditing.sharded import STEPS, compiled
from tests.memory.test_estimate import needs_h100

pytestmark = pytest.mark.usefixtures("standard_jax")

TRIES = 100
QUICK = (
    *("data", "fully_sharded", "tensor", "both", "three", "adam", "summed_by_hand"),
    *("ring", "experts", "images", "rows_of_table", "until_small"),
)
ALIKE = ("data", "tensor", "until_small")  # all that they sum is seen
WRITTEN = re.compile(r"replica_groups=.*?(?=, \w+=)")
SUM = re.compile(r"^  (?:ROOT )?%([\w.\-]+) = (.+?) all-reduce\((.*?)\)(.*)$", re.M)


def rules_of(hlo, assignment, facts):
    return {finding.rule for finding in audit_texts(hlo, assignment, facts)}


@pytest.mark.parametrize("name", QUICK)
def test_nothing_is_found_in_what_is_right(name):
    texts = compiled(name)
    module = Module(*texts)
    assert module.shardings.joins and len(module.shardings.outputs) == len(
        module.step.outputs
    )
    assert None not in module.shardings.outputs
    assert audit_texts(*texts) == ()


@pytest.mark.parametrize("name", ALIKE)
def test_a_report_knows_what_the_text_may_not_tell(name):
    """On jax 0.12 the module's text says of no parameter how it is sharded."""
    step, args = STEPS[name]()
    hlo, assignment, facts = jaxmem.estimate(step, *args).compiler_texts()
    shards, sizes = compiled(name)[2].shards, compiled(name)[2].outputs
    assert facts.shards == shards and facts.outputs == sizes
    unsaid = re.sub(r", sharding=\{.*?\}(?=, \w+=|$)", "", hlo, flags=re.M)
    assert audit_texts(unsaid, assignment, facts) == ()
    module = Module(unsaid, assignment, facts)
    assert module.shardings.joins and None not in module.shardings.outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", ["cpu", "tpu-v5e", pytest.param("h100", marks=needs_h100)]
)
@pytest.mark.parametrize("name", STEPS)
def test_nothing_is_found_on_chips(name, target):
    texts = compiled(name, target)
    assert audit_texts(*texts) == ()
    assert Module(*texts).shardings.joins


@functools.cache
def sums(names=QUICK, single=True):
    """(step, the line of a sum) of those that are no shard_map's, nor maxima."""
    found = [(n, line) for n in names for line in SUM.finditer(compiled(n)[0])]
    found = [(n, line) for n, line in found if "shard_map" not in compiled(n)[0]]
    found = [(n, line) for n, line in found if "reduce_max" not in line[4]]
    found = [(n, line) for n, line in found if not single or "," not in line[3]]
    assert len(found) >= 3
    return found


def test_a_sum_that_is_missing():
    draw = random.Random(0)
    for _ in range(TRIES):
        name, line = draw.choice(sums(ALIKE, single=False))
        hlo, assignment, facts = compiled(name)
        kept = " tuple(" if line[2].startswith("(") else " copy("
        without = line.group().replace(" all-reduce(", kept)
        changed = hlo.replace(line.group(), without, 1)
        assert "collectives" in rules_of(changed, assignment, facts), line.group()


def test_a_sum_over_other_devices():
    """Of the axis of a mesh that the value does not differ along."""
    draw = random.Random(1)
    pairs = [
        (name, line)
        for name, line in sums(("both", "three", "rows_of_table"), single=False)
        if groups_of(line[4], 8) and 1 < len(groups_of(line[4], 8)) < 8
    ]
    for _ in range(TRIES):
        name, line = draw.choice(pairs)
        hlo, assignment, facts = compiled(name)
        groups = groups_of(line[4], 8)
        turned = list(zip(*groups, strict=True))  # the groups across these
        text = ",".join("{" + ",".join(map(str, group)) + "}" for group in turned)
        written = WRITTEN.search(line[4])
        wrong = line.group().replace(written.group(), f"replica_groups={{{text}}}")
        assert wrong != line.group()
        changed = hlo.replace(line.group(), wrong, 1)
        assert "collectives" in rules_of(changed, assignment, facts), line.group()


def test_a_sum_that_is_made_twice():
    draw = random.Random(2)
    for _ in range(TRIES):
        name, line = draw.choice(sums())
        hlo, assignment, facts = compiled(name)
        first = line.group().replace(f"%{line[1]} =", "%first =").replace("ROOT ", "")
        second = line.group().replace(f"({line[3]})", "(%first)")
        changed = hlo.replace(line.group(), f"{first}\n{second}", 1)
        assert "collectives" in rules_of(changed, assignment, facts), line.group()


def test_parts_that_are_cut_out_before_they_are_summed():
    draw = random.Random(3)
    lines = [(n, line) for n, line in sums() if re.search(r"\[(\d+)", line[2])]
    for _ in range(TRIES):
        name, line = draw.choice(lines)
        hlo, assignment, facts = compiled(name)
        part = re.sub(r"\[(\d+)", "[1", line[2], count=1)
        rank = line[2].split("]")[0].count(",")
        start = ", ".join(["%own", *["%none"] * rank])
        cut = (
            "  %own = u32[] partition-id()\n  %none = u32[] constant(0)\n"
            f"  %cut = {part} dynamic-slice({line[3]}, {start}), "
            "dynamic_slice_sizes={1}\n"
        )
        summed = line.group().replace(f"({line[3]})", "(%cut)")
        changed = hlo.replace(line.group(), cut + summed.replace(line[2], part), 1)
        findings = audit_texts(changed, assignment, facts)
        what = [f.what for f in findings if f.rule == "collectives"]
        assert any("different places" in one for one in what), line.group()


def test_a_loop_that_devices_leave_at_different_times():
    hlo, assignment, facts = compiled("until_small")
    module = Module(hlo, assignment, facts)
    (loop,) = [
        module.hlo.instruction(name)
        for name, (_, rest) in module.hlo.lines.items()
        if " while(" in rest
    ]
    root = module.hlo.roots[module.hlo.condition(loop)]
    line = re.search(rf"^  ROOT %?{re.escape(root)} = .*$", hlo, re.M).group()
    kept = line.replace("ROOT ", "").replace(f"%{root} =", "%together =")
    by_device = (
        "  %own = u32[] partition-id()\n  %three = u32[] constant(3)\n"
        "  %mine = pred[] compare(%own, %three), direction=LT\n"
        f"  ROOT %{root} = pred[] and(%together, %mine)"
    )
    changed = hlo.replace(line, f"{kept}\n{by_device}", 1)
    findings = audit_texts(changed, assignment, facts)
    assert any("deadlock" in finding.what for finding in findings)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("replica_groups={}", ((0, 1, 2, 3),)),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        (
            "replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}",
            ((0, 1, 4, 5), (2, 3, 6, 7)),
        ),
        ("no_groups=1", None),
    ],
)
def test_groups(text, groups):
    assert groups_of(text, 4) == groups


@pytest.mark.parametrize(
    ("text", "shards"),
    [
        ("{replicated}", ((0, 0, 0, 0), (0, 0, 0, 0))),
        ("{devices=[4,1]<=[4]}", ((0, 1, 2, 3), (0, 0, 0, 0))),
        ("{devices=[2,1,2]<=[4] last_tile_dim_replicate}", ((0, 0, 1, 1), (0,) * 4)),
        ("{devices=[2,2]<=[2,2]T(1,0)}", ((0, 1, 0, 1), (0, 0, 1, 1))),
        ("{devices=[2,2]0,2,1,3}", ((0, 1, 0, 1), (0, 0, 1, 1))),
        ("{mesh['a'=2,'b'=2], [{'b'}, {}]}", ((0, 1, 0, 1), (0, 0, 0, 0))),
        ("{mesh['a'=2,'b'=2], [{'a', 'b'}, {}]}", ((0, 1, 2, 3), (0,) * 4)),
        ("{manual}", None),
    ],
)
def test_shards(text, shards):
    assert shards_of(f"sharding={text}, metadata={{}}", 2, 4) == shards


def test_pairs_of_a_permutation():
    text = "source_target_pairs={{0,1},{1,0}}, metadata={}"
    assert sources_of(text) == ((0, 1), (1, 0))
