"""A slice at an index, of an array that the same fusion updates at another one."""

from collections.abc import Iterator

from jaxmem.faults.finders.reading import reaches
from jaxmem.memory.buffers import Hlo, Instruction

# in the line of a fusion that is compiled for a GPU
_OF_GPU = '"force_earliest_schedule"'


def rolled_updates(hlo: Hlo) -> Iterator[tuple[str, str]]:
    """Finds slices of updated arrays in a fusion, both at indices that are given."""
    for name, (_, rest) in hlo.lines.items():
        marks = " fusion(", "kind=kLoop", _OF_GPU
        if any(mark not in rest for mark in marks):
            continue
        made = hlo.instruction(name)
        for one in hlo.body(made.called[0]) if made is not None else ():
            if one.opcode == "dynamic-slice" and _moves(hlo, one, 1):
                if update := _updated(hlo, one):
                    yield (
                        name,
                        f"{one.name} reads what {update.name} has updated in the same "
                        "fusion: a GPU takes the start of one for that of the other",
                    )


def _updated(hlo: Hlo, made: Instruction) -> Instruction | None:
    """The update that a slice reads, of a value that the fusion computes as well."""
    for one in reaches(hlo, made.operands[0], without=("parameter",)):
        computed = one.opcode == "dynamic-update-slice" and _moves(hlo, one, 2)
        if computed and _is_computed(hlo, one.operands[1]):
            return one
    return None


def _moves(hlo: Hlo, made: Instruction, first: int) -> bool:
    """Whether the index of a slice is none of constants alone."""
    index = (hlo.instruction(name) for name in made.operands[first:])
    return any(one is not None and one.opcode != "constant" for one in index)


def _is_computed(hlo: Hlo, name: str) -> bool:
    made = hlo.instruction(name)
    return made is not None and made.opcode != "parameter"
