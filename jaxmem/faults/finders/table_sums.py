"""A table's gradient, added up in a loop, of which devices have a part each.

The partitioner has each device add its rows into a table of zeros, but for one device,
which adds them into the sum so far; then all add up their tables. XLA's pass
`while-loop-all-reduce-code-motion` moves that behind the loop, and leaves the zeros in
it: what the other devices have added in earlier iterations is lost.
"""

from collections.abc import Iterator
from typing import Any

from jaxmem._checks import array_text
from jaxmem.faults.finders.reading import reaches, starts_at
from jaxmem.faults.program import ProgramLevel, TracedProgram, levels
from jaxmem.ir import primitives
from jaxmem.ir.jaxprs import is_var
from jaxmem.ir.scans import carried_aliases
from jaxmem.memory.buffers import KINDS, Hlo, Instruction


def sums_of_tables(program: TracedProgram) -> Iterator[tuple[Any, str]]:
    """Finds sums, carried by a loop, to which the rows of a scatter are added."""
    if program.devices > 1:
        yield from ((eqn, _what(eqn)) for eqn, _ in loops_of_tables(program.closed))


def loops_of_tables(closed) -> Iterator[tuple[Any, bool]]:
    """The scatters that XLA adds right into what a loop carries, outside of shard_maps.

    Each with whether the step itself adds it so; else it adds a table of its own.
    """
    for level in levels(closed):
        is_loop = level.eqn is not None and primitives.is_loop(level.eqn)
        if is_loop and not _in_shard_map(level):
            yield from _added_tables(level)


def _added_tables(level: ProgramLevel) -> Iterator[tuple[Any, bool]]:
    graph = level.graph
    for out, place in carried_aliases(level.eqn).items():
        if out >= len(graph.outvars) or place >= len(graph.arguments):
            continue
        carry, made = graph.arguments[place], level.made(graph.outvars[out])
        if made is None:
            continue
        inner, eqn = made
        if _is_scatter(eqn) and inner.root(eqn.invars[0]) is carry:
            yield eqn, True
        elif primitives.is_sum(eqn):
            terms = [v for v in eqn.invars if inner.root(v) is not carry]
            if len(terms) == 1 and (scatter := _into_zeros(inner, terms[0])):
                yield scatter, False


def _is_scatter(eqn) -> bool:
    return primitives.is_scatter_add(eqn)


def _into_zeros(level: ProgramLevel, v) -> Any:
    made = level.made(v)
    if made is None or not _is_scatter(made[1]):
        return None
    inner, scatter = made
    return scatter if _is_zero(inner, scatter.invars[0]) else None


def _is_zero(level: ProgramLevel, v) -> bool:
    while is_var(v):
        made = level.made(v)
        if made is None or not primitives.of(made[1]).rearranges:
            return False
        level, v = made[0], made[1].invars[0]
    return not v.val


def _in_shard_map(level: ProgramLevel | None) -> bool:
    while level is not None:
        if level.eqn is not None and primitives.is_shard_map(level.eqn):
            return True
        level = level.outer
    return False


def _what(eqn) -> str:
    aval = eqn.outvars[0].aval
    table = array_text(aval)
    return (
        f"the gradient of a table {table} is added up in a loop: of examples that are "
        "sharded over devices those of all devices but one are lost, except for the "
        "last iteration's"
    )


def sums_left_behind(hlo: Hlo) -> Iterator[tuple[str, str]]:
    """Finds loops in which devices keep zeros in place of what they have added."""
    masks = {name for name in hlo.lines if _is_mask(hlo, name)}
    if not masks:
        return
    for name in hlo.loops.values():
        loop = hlo.instruction(name)
        if loop is None:
            continue
        end = hlo.instruction(hlo.roots.get(loop.called[0], ""))
        sums = end.operands if end is not None and end.opcode == "tuple" else ()
        for place, value in enumerate(sums):
            found = next(_masked(hlo, masks, value, place), None)
            if found is not None:
                yield (
                    found.name,
                    "each device but one replaces by zeros, in each iteration, what it "
                    "has added to a table, and sums over devices are taken after the "
                    "loop",
                )


def _is_mask(hlo: Hlo, name: str) -> bool:
    """Whether it is a scatter's select by the device's number: few modules have one."""
    _, text = hlo.lines[name]
    if " select(" not in text or "scatter" not in text:
        return False
    made = hlo.instruction(name)
    return made is not None and "scatter" in _operation(made) and _of_device(hlo, made)


def _of_device(hlo: Hlo, made: Instruction) -> bool:
    reached = reaches(hlo, made.operands[0])
    return any(one.opcode == "partition-id" for one in reached)


def _masked(hlo: Hlo, masks: set[str], value: str, place: int) -> Iterator[Instruction]:
    """Those of `masks` between a value and the loop's carry."""
    for made in reaches(hlo, value, without=KINDS):
        between = made.name in masks
        if between and any(starts_at(hlo, v, place) for v in made.operands[1:]):
            yield made


def _operation(made: Instruction) -> str:
    return made.metadata.get("op_name", "").rpartition("/")[2]
