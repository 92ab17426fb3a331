"""The integers that a compiled module computes in each iteration of a loop.

Of single elements alone, and only of those that follow from constants and from the
number of the iteration, as indices of slices do.
"""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxmem.ir.operands_first import operands_first
from jaxmem.memory.buffers.hlo import Hlo, Instruction

_CALLS = ("fusion", "call", "async")
_SAME = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done")
_NUMBERS = {"true": 1, "false": 0}
_SINGLE = re.compile(r"(?:[su]\d+|pred)\[[1,]*\]")
_INTEGER = re.compile(r"([su])(\d+)\[")
_DIRECTION = re.compile(r"direction=(\w\w)")
_DO: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "negate": operator.neg,
    "minimum": min,
    "maximum": max,
    "clamp": lambda low, x, high: min(max(low, x), high),
    "select": lambda condition, yes, no: yes if condition else no,
    "and": operator.and_,
    "or": operator.or_,
    # towards zero, as XLA rounds
    "divide": lambda x, y: int(x / y),
    "remainder": lambda x, y: x - y * int(x / y),
}
_KNOWN = {*_SAME, *_DO, "compare"}
_Place = tuple[str, int]  # an instruction, and an iteration


@dataclass
class Integers:
    """What an element is in an iteration of `loop`; None: this is outside of loops."""

    hlo: Hlo
    loop: Instruction | None
    known: dict[_Place, int | None] = field(default_factory=dict)

    def at(self, name: str, k: int) -> int | None:
        """Its value in iteration `k`, from 0; None where the text does not tell it."""
        for one in operands_first((name, k), self._missing):
            if one not in self.known:
                self.known[one] = self._value(*one)
        return self.known[name, k]

    def _missing(self, place: _Place) -> list[_Place]:
        read = () if place in self.known else self._read(*place) or ()
        return [one for one in read if one not in self.known]

    def _value(self, name: str, k: int) -> int | None:
        made, read = self.hlo.instruction(name), self._read(name, k)
        if made is None or read is None:
            return None
        if made.opcode == "constant":
            text = _NUMBERS.get(made.argument, made.argument)
            return int(text) if re.fullmatch(r"-?\d+", str(text)) else None
        numbers = [v for v in map(self.known.__getitem__, read) if v is not None]
        if len(numbers) < len(read):
            return None
        return _computed(made, numbers) if made.opcode in _KNOWN else numbers[0]

    def _read(self, name: str, k: int) -> list[_Place] | None:
        """What it is made of, and in which iteration; None where that is not told."""
        made = self.hlo.instruction(name)
        if made is None:
            return None
        if made.opcode == "constant":
            return []
        if made.opcode == "parameter":
            caller = self.hlo.instruction(self.hlo.callers.get(made.computation, ""))
            if caller is None or not _is_call(caller):
                return None
            return [(caller.operands[made.element], k)]
        if made.opcode == "get-tuple-element":
            return self._element(made, k)
        if _is_call(made):
            return [(self.hlo.roots.get(made.called[0], ""), k)]
        # what is made of data is not followed: it is no index
        if made.opcode not in _KNOWN or not _SINGLE.match(made.shape):
            return None
        return [(v, k) for v in made.operands]

    def _element(self, made: Instruction, k: int) -> list[_Place] | None:
        """An element of a tuple, of the loop-carried one among others."""
        whole = self.hlo.instruction(made.operands[0])
        if whole is not None and _is_call(whole):
            whole = self.hlo.instruction(self.hlo.roots.get(whole.called[0], ""))
        elif whole is not None and self.loop is not None and self._carries(whole):
            start, body = self.loop.operands[0], self.loop.called[0]
            whole = self.hlo.instruction(start if k == 0 else self.hlo.roots[body])
            k = max(0, k - 1)
        if whole is None or whole.opcode != "tuple":
            return None
        return [(whole.operands[made.element], k)]

    def _carries(self, whole: Instruction) -> bool:
        assert self.loop is not None
        return whole.opcode == "parameter" and whole.computation == self.loop.called[0]


def _is_call(made: Instruction) -> bool:
    """Whether it calls a computation with its operands, at once or asynchronously.

    XLA dumps an asynchronous call as `async-start`, of a computation that has the call
    alone; `as_text()` of a compiled program has `fusion-start` in place of both.
    """
    return made.opcode.removesuffix("-start") in _CALLS


def _computed(made: Instruction, values: list[int]) -> int | None:
    if made.opcode in _SAME:
        return _wrapped(values[0], made.shape)
    if made.opcode == "compare":
        found = _DIRECTION.search(made.attributes)
        return (
            int(getattr(operator, found.group(1).lower())(*values)) if found else None
        )
    if made.opcode in ("divide", "remainder") and values[1] == 0:
        return None
    return _wrapped(_DO[made.opcode](*values), made.shape)


def _wrapped(value: int, shape: str) -> int:
    """As the type holds it: adding 4,294,967,295 to a u32 takes 1 away."""
    found = _INTEGER.match(shape)
    if found is None:
        return value
    bits = int(found.group(2))
    low = -(1 << (bits - 1)) if found.group(1) == "s" else 0
    return (value - low) % (1 << bits) + low
