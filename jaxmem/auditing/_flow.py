"""Which value an operand names: through tuples, bitcasts, loops, calls and branches.

The buffer assignment lists each value once, where it is made. Everywhere else in the
module it goes by the names of instructions that compute nothing.
"""

from jaxmem.memory.buffers import Hlo, Instruction
from jaxmem.memory.buffers.assignment import BufferValue, Key
from jaxmem.memory.buffers.shapes import elements_of

SAME = frozenset("bitcast opt-barrier optimization-barrier add-dependency".split())
SILENT = SAME | frozenset("tuple get-tuple-element parameter constant".split())


class Flow:
    """Follows the names of a module to the values that are assigned."""

    def __init__(self, hlo: Hlo, values: dict[Key, BufferValue]):
        self.hlo, self.values = hlo, values
        self._known: dict[Key, Key | None] = {}

    def value(self, name: str, index: tuple[int, ...] = ()) -> Key | None:
        """The value that is at this place of an instruction's result."""
        name, *path = name.split("#")
        key = name, (*map(int, path), *index)
        if key not in self._known:
            self._known[key] = None  # until it is found: a name may lead to itself
            is_own = key in self.values and not self._is_unchanged(*key)
            self._known[key] = key if is_own else self._through(*key)
        return self._known[key]

    def _is_unchanged(self, name: str, index: tuple[int, ...]) -> bool:
        """Whether a loop is listed as a maker of what it only hands on."""
        # XLA may go on listing an element of a loop whose body was found to return it
        # as it is: then the body's own argument is no longer a value.
        made = self.hlo.instruction(name)
        if made is not None and made.opcode == "parameter":
            tested, place = made.computation, self.hlo.callers
            made = self.hlo.instruction(place.get(tested, ""))
            if made is not None and tested in made.called:
                return False  # the body itself
        if made is None or made.opcode != "while":
            return False
        return (self.argument(made), index) not in self.values

    def argument(self, loop: Instruction) -> str:
        """The name of what the body of a loop is given."""
        body = self.hlo.body(loop.called[0])
        return next(one.name for one in body if one.opcode == "parameter")

    def leaves(self, name: str) -> list[Key]:
        """The values of an instruction's result, one for each array."""
        found = (self.value(name, index) for index in _places(self.shape(name)))
        return [key for key in found if key is not None]

    def shape(self, name: str) -> str:
        """The shape of an instruction's result."""
        return self.hlo.shape_of(name)

    def _through(self, name: str, index: tuple[int, ...]) -> Key | None:
        made = self.hlo.instruction(name)
        if made is None:
            return None
        kind = made.opcode
        if kind == "tuple" and index and index[0] < len(made.operands):
            return self.value(made.operands[index[0]], index[1:])
        if kind == "get-tuple-element":
            return self.value(made.operands[0], (made.element, *index))
        if kind in SAME or kind == "while":
            return self.value(made.operands[0], index)
        if kind in ("call", "conditional"):
            return self.value(self.hlo.roots.get(made.called[0], ""), index)
        if kind == "parameter":
            return self._argument(made, index)
        if kind.endswith("-start"):
            return self._started(made, index)
        if kind.endswith("-done"):
            return self._done(made, index)
        return None

    def _argument(self, made: Instruction, index: tuple[int, ...]) -> Key | None:
        """What the caller of a computation hands it."""
        caller = self.hlo.instruction(self.hlo.callers.get(made.computation, ""))
        if caller is None or caller.opcode == "fusion":
            return None
        place = made.element
        if caller.opcode == "conditional":
            place = 1 + caller.called.index(made.computation)
        if place >= len(caller.operands):
            return None
        return self.value(caller.operands[place], index)

    def _started(self, made: Instruction, index: tuple[int, ...]) -> Key | None:
        if not index:
            return None
        place, rest = index[0], index[1:]
        if made.opcode == "copy-start":
            return self.value(made.operands[0], rest) if place == 1 else None
        if made.opcode == "async-start" and place == 1:
            return self.value(self.hlo.roots.get(made.called[0], ""), rest)
        if place != 0:
            return None
        if made.opcode != "async-start" and len(made.operands) == 1:
            return self.value(made.operands[0], rest)
        if not rest or rest[0] >= len(made.operands):
            return None
        return self.value(made.operands[rest[0]], rest[1:])

    def _done(self, made: Instruction, index: tuple[int, ...]) -> Key | None:
        start = made.operands[0]
        place = (0,) if made.opcode == "copy-done" else (1,)
        return self.value(start, (*place, *index)) or self.value(start, index)


def _places(shape: str) -> list[tuple[int, ...]]:
    if not shape.startswith("("):
        return [()]
    inner = enumerate(elements_of(shape))
    return [(i, *rest) for i, one in inner for rest in _places(one)]
