"""Elements that neighbouring threads read from places far apart.

A loop has its threads in the order of what it writes, a transposition in tiles in the
order of what it transposes; what is transposed beside that is read element by element.
"""

from jaxmem.memory.buffers.hlo import Hlo, Instruction
from jaxmem.memory.buffers.shapes import arrays_of
from jaxmem.memory.time.reading import elements_of, layout

_MOVES = ("transpose", "reduce", "copy")  # the latter two by the layout of a result
LARGE = 2**18  # elements of an array that does not stay in the L1 cache
SECTOR = 32  # bytes that a GPU fetches at least


def strided(hlo: Hlo, made: Instruction, tiles: bool) -> int:
    """How many elements a fusion reads whose last axis has become another one.

    Args:
        hlo: the module.
        made: the fusion.
        tiles: whether the transposition that comes last is done in tiles.
    """
    found: dict[str, int] = {}
    todo = [(hlo.roots.get(c, ""), 0 if tiles else 1, 0) for c in made.called]
    seen = set()
    while todo:
        name, turned, elements = todo.pop()
        one = hlo.instruction(name)
        if one is None or (name, turned) in seen:
            continue
        seen.add((name, turned))
        if one.opcode == "parameter":
            if turned and turned % 2 == 0 and elements_of(one.shape) >= LARGE:
                found[name] = elements
            continue
        turned += one.opcode in _MOVES and _turns(hlo, one)
        if one.opcode == "reduce":
            elements = elements_of(hlo.shape_of(one.operands[0]))
        elif one.opcode not in ("bitcast", "tuple"):
            elements = elements_of(one.shape)
        todo += [(operand, turned, elements) for operand in one.operands]
    return sum(found.values())


def _turns(hlo: Hlo, made: Instruction) -> bool:
    """Whether neighbours in memory are others than before, single elements aside."""
    turns = made.opcode == "transpose"
    shape = hlo.shape_of(made.operands[0]) if turns else made.shape
    order = made.listed("dimensions") if turns else layout(shape)
    real = [axis for axis in order if arrays_of(shape)[0].sizes[axis] > 1]
    return bool(real) and real[-1] != max(real)
