"""Walks over what the instructions of a module are computed of."""

from collections.abc import Iterator, Sequence

from jaxmem.memory.buffers import Hlo, Instruction

_SAME = frozenset("bitcast copy get-tuple-element".split())
_CALLS = frozenset("fusion call async-start".split())


def reaches(hlo: Hlo, name: str, without: Sequence[str] = ()) -> Iterator[Instruction]:
    """What a value is computed of, in the computation around, and inside of calls.

    Args:
      hlo: the module.
      name: of the value.
      without: opcodes behind which nothing is looked at.
    """
    todo, seen = [name], set()
    while todo:
        made = hlo.instruction(todo.pop())
        if made is None or made.name in seen:
            continue
        seen.add(made.name)
        yield made
        if any(made.opcode.startswith(kind) for kind in without):
            continue
        todo += operands(hlo, made)


def operands(hlo: Hlo, made: Instruction) -> list[str]:
    """What an instruction reads: of a call its root, of its inputs the operands."""
    if made.opcode in _CALLS:
        return [hlo.roots.get(made.called[0], "")]
    if made.opcode == "parameter":
        around = _caller(hlo, made)
        if around is None or made.element >= len(around.operands):
            return []
        return [around.operands[made.element]]
    return list(made.operands)


def starts_at(hlo: Hlo, name: str, place: int) -> bool:
    """Whether a value is the one that a loop carries at this place."""
    while (made := hlo.instruction(name)) is not None:
        if made.opcode == "get-tuple-element" and _is_carry(hlo, made):
            return made.element == place
        if made.opcode == "parameter" or made.opcode in _SAME:
            name = next(iter(operands(hlo, made)), "")
            continue
        return False
    return False


def _is_carry(hlo: Hlo, made: Instruction) -> bool:
    source = hlo.instruction(made.operands[0])
    return source is not None and source.opcode == "parameter"


def _caller(hlo: Hlo, made: Instruction) -> Instruction | None:
    caller = hlo.instruction(hlo.callers.get(made.computation, ""))
    return caller if caller is not None and caller.opcode in _CALLS else None
