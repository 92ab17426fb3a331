"""A loop does not read of an array that nothing filled what it has not written yet.

XLA:GPU's option that leaves stacks of loops unfilled looks for loops that write every
part, before the loop reads the array as it was. What the loop reads of the array that
it has updated is not looked at, as a decoder reads its whole cache for each position.
"""

from collections.abc import Iterator

from jaxmem.auditing._module import Module
from jaxmem.auditing._report import AuditFinding
from jaxmem.memory.buffers.hlo import Hlo, Instruction
from jaxmem.memory.time.fills import OPTION, starts

_WAY_ROUND = f"compile with compiler_options={{{OPTION!r}: False}}"
_UPDATE = "dynamic-update-slice"
_SAME = ("bitcast", "tuple", "get-tuple-element")


def read_unwritten(module: Module) -> Iterator[AuditFinding]:
    """Finds what reads an array that the same loop has written a part of."""
    if OPTION not in module.step.options:
        return
    for loop, place, made in starts(module.hlo):
        if "AllocateBuffer" in made.attributes:
            for reader in _readers(module.hlo, loop, place):
                what = f"{reader} reads what {loop.name} has not written yet"
                yield module.finding("read_unwritten", reader, what, _WAY_ROUND)


def _readers(hlo: Hlo, loop: Instruction, place: int) -> Iterator[str]:
    """Who reads, in the loop's body, what it hands on at a place of its tuple."""
    body = loop.called[0]
    root = hlo.instruction(hlo.roots[body])
    if root is None or root.opcode != "tuple":
        yield loop.name
        return
    yield from _read(hlo, root.operands[place], root.name)
    for made in hlo.body(body):
        if any(_is_carried(hlo, name, place) for name in made.operands):
            yield from _read_inside(hlo, made)


def _is_carried(hlo: Hlo, name: str, place: int) -> bool:
    """Whether a value is what the body gets at a place of its tuple."""
    made = hlo.instruction(name)
    if made is None or made.opcode != "get-tuple-element" or made.element != place:
        return False
    source = hlo.instruction(made.operands[0])
    return source is not None and source.opcode == "parameter"


def _read_inside(hlo: Hlo, made: Instruction) -> Iterator[str]:
    """Who reads an updated array within the fusion that updates it."""
    waiting = list(made.called)
    while waiting:
        computation = waiting.pop()
        for one in hlo.body(computation):
            waiting += one.called if one.opcode == "fusion" else ()
            if one.opcode == _UPDATE:
                yield from _read(hlo, one.name, hlo.roots[computation])


def _read(hlo: Hlo, name: str, root: str) -> Iterator[str]:
    """Who reads a value, besides the root of its computation, and not only views it."""
    waiting, seen = [name], {root}
    while waiting:
        value = waiting.pop()
        for reader in hlo.readers.get(value, ()):
            made = hlo.instruction(reader)
            # else it only waits for it
            if made is None or value not in made.operands or reader in seen:
                continue
            seen.add(reader)
            if made.opcode not in _SAME:
                yield reader
            else:
                waiting.append(reader)
