"""A table's gradient, cut into the devices' rows before it is summed over them."""

from collections.abc import Iterator

from jaxmem.faults.finders.reading import reaches
from jaxmem.memory.buffers import Hlo, Instruction

_SUMS = ("all-reduce", "all-reduce-start")


def cut_before_the_sum(hlo: Hlo) -> Iterator[tuple[str, str]]:
    """Finds sums over devices of slices that each takes at a place of its own.

    Rows of a scatter are meant that has run over the whole table: those of one device
    are added to others of another one.
    """
    for name, (_, rest) in hlo.lines.items():
        made = hlo.instruction(name) if " all-reduce" in rest else None
        if made is None or made.opcode not in _SUMS:
            continue
        for operand in made.operands:
            for one in reaches(hlo, operand, without=("all-", "reduce-scatter")):
                if one.opcode == "dynamic-slice" and _of_scatter(hlo, one):
                    yield (
                        name,
                        f"{one.name} takes each device's rows of a table's gradient "
                        f"before {name} sums them: they are not the same rows",
                    )


def _of_scatter(hlo: Hlo, made: Instruction) -> bool:
    """Whether rows are taken of a scatter's result, by the number of the device."""
    rows, *index = made.operands
    source = reaches(hlo, rows, without=("all-", "reduce-scatter"))
    scattered = any(one.opcode == "scatter" for one in source)
    own = any(
        one.opcode == "partition-id" for name in index for one in reaches(hlo, name)
    )
    return scattered and own
