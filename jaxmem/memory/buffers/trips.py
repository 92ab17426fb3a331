"""How often the loops of a compiled module run."""

import re
from collections.abc import Iterator

from jaxmem.memory.buffers.hlo import Hlo, Instruction

_KNOWN = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_SAME = ("copy", "bitcast", "copy-done", "copy-start")
_HOPS = 8  # from a value to the number that it is


def trips(hlo: Hlo, loop: Instruction) -> int:
    """How often a while loop runs; 0 where its text does not tell.

    XLA says it of most loops. Those that it makes itself, to gather weights while they
    are multiplied, count from one number to another.
    """
    if known := _KNOWN.search(loop.attributes):
        return int(known.group(1))
    test = _root(hlo, re.search(r"condition=%?([\w.\-]+)", loop.attributes))
    if test is None or test.opcode != "compare" or "=LT" not in test.attributes:
        return 0
    counter, last = hlo.instruction(test.operands[0]), _number(hlo, test.operands[1])
    if counter is None or counter.opcode != "get-tuple-element" or last is None:
        return 0
    first = _number(hlo, _element(hlo, loop.operands[0], counter.element))
    end = _root(hlo, re.search(r"body=%?([\w.\-]+)", loop.attributes))
    step = None if end is None else _step(hlo, end.operands[counter.element])
    if first is None or not step:
        return 0
    return max(0, -((first - last) // step))


def loops_around(hlo: Hlo, made: Instruction) -> Iterator[Instruction]:
    """The while loops around an instruction, the innermost first."""
    caller = hlo.instruction(hlo.callers.get(made.computation, ""))
    while caller is not None:
        if caller.opcode == "while":
            yield caller
        caller = hlo.instruction(hlo.callers.get(caller.computation, ""))


def _root(hlo: Hlo, computation: re.Match[str] | None) -> Instruction | None:
    name = hlo.roots.get(computation.group(1)) if computation else None
    return None if name is None else hlo.instruction(name)


def _element(hlo: Hlo, name: str, k: int) -> str:
    """The name of an element of a tuple; "" where it is not made in place."""
    made = hlo.instruction(name)
    fits = made is not None and made.opcode == "tuple" and k < len(made.operands)
    return made.operands[k] if made is not None and fits else ""


def _number(hlo: Hlo, name: str) -> int | None:
    """The constant that a value is."""
    for _ in range(_HOPS):
        made = hlo.instruction(name)
        if made is None:
            return None
        if made.opcode == "constant":
            return int(made.argument) if made.argument.isdigit() else None
        if made.opcode not in _SAME or not made.operands:
            return None
        name = made.operands[0]
    return None


def _step(hlo: Hlo, name: str) -> int | None:
    """What an iteration adds to the counter."""
    total = 0
    for _ in range(_HOPS):
        made = hlo.instruction(name)
        if made is None:
            return None
        if made.opcode == "get-tuple-element":
            return total
        if made.opcode == "add":
            added = _number(hlo, made.operands[1])
            if added is None:
                return None
            total += added
        elif made.opcode not in _SAME:
            return None
        name = made.operands[0]
    return None
