"""Traces a buffer back to the operation that made what lies in it.

A buffer of stacked residuals is, to XLA, a zero-filled array that a while loop hands on
and updates in place. The user wants the operation whose results are stacked: the trace
goes through loops, fusions, tuples and updates to it.
"""

import pathlib
from dataclasses import dataclass

from jaxmem.memory._hlo import Hlo, Instruction, Location
from jaxmem.memory._holder import group_of
from jaxmem.memory._module_path import OpName, parse_op_name

_TRANSPARENT = frozenset(
    "bitcast copy reshape bitcast-convert optimization-barrier copy-done"
    " all-gather-done all-reduce-done collective-permute-done send-done".split()
)
# Moves data only: worth naming if the user wrote it, else the trace goes on.
_MOVING = frozenset("transpose convert slice dynamic-slice".split())
_BORING = frozenset(
    "dynamic_update_slice dynamic_slice broadcast_in_dim while closed_call body"
    " jit(dynamic_index_in_dim) jit(dynamic_update_index_in_dim) squeeze copy"
    " reshape call_exported".split()
)
# Frames of these are not the user's own lines; the innermost other frame is shown.
_OURS = str(pathlib.Path(__file__).resolve().parents[1])
_LIBRARIES = ("/site-packages/", "/dist-packages/", "<frozen ", _OURS)
_VERBS = {"convert": "cast", "slice": "slice", "dynamic-slice": "slice"}
_STEPS = 400


@dataclass(frozen=True)
class Origin:
    """The operation behind a buffer."""

    name: OpName
    opcode: str
    location: Location | None

    @property
    def source(self) -> str:
        """`file.py:12`, empty where unknown."""
        return f"{self.location.file}:{self.location.line}" if self.location else ""

    @property
    def function(self) -> str:
        """The Python function, without where it is defined."""
        return self.location.function.replace(".<locals>", "") if self.location else ""

    @property
    def group(self) -> str:
        """What a report groups it under."""
        return group_of(self.name.module_path, self.function, self.name.operation)


NOWHERE = Origin(parse_op_name(""), "", None)


class Tracer:
    """Origins of the values of one module, each traced once."""

    def __init__(self, hlo: Hlo):
        self.hlo = hlo
        self._known: dict[tuple[str, tuple[int, ...]], Origin] = {}

    def origin(self, name: str, index: tuple[int, ...] = ()) -> Origin:
        """The operation that made the array `name{index}`."""
        key = name, index
        if key not in self._known:
            self._known[key] = self._trace(name, index)
        return self._known[key]

    def _trace(self, name: str, index: tuple[int, ...]) -> Origin:
        seen: dict[tuple[str, tuple[int, ...]], None] = {}
        last = best = None
        verb = "copy"
        for _ in range(_STEPS):
            instruction = self.hlo.instruction(name)
            if instruction is None or (name, index) in seen:
                break
            seen[name, index] = None
            last = instruction
            verb = verb if verb == "cast" else _VERBS.get(instruction.opcode, verb)
            if _informative(instruction):
                best = best or instruction
            step = self._back(instruction, index, seen)
            if step is None:
                step = self._forward(instruction, seen)
                if step is None or step in seen:
                    break
            name, index = step
        if last is None:
            return NOWHERE
        # The end of the trace says more than what was passed on the way, unless it
        # carries no name, as instructions the compiler adds do not.
        chosen = last if _informative(last) else best or last
        return self._origin(chosen, last, verb)

    def _origin(self, named: Instruction, last: Instruction, verb: str) -> Origin:
        stack = list(self.hlo.stack(named))
        own = [f for f in stack if not any(part in f.file for part in _LIBRARIES)]
        location = next(iter(own or stack), None)
        op_name = named.metadata.get("op_name", "")
        if last.opcode == "parameter":
            copied = OpName("", f"{verb} of {op_name or last.name}", False, False)
            return Origin(copied, "", location)
        return Origin(parse_op_name(op_name), last.opcode, location)

    def _back(self, at: Instruction, index, seen):
        """One step towards the producer, None at an operation that computes."""
        match at.opcode:
            case "parameter":
                return self._caller(at, index, seen)
            case "get-tuple-element":
                return at.operands[0], (at.element, *index)
            case "tuple":
                return (at.operands[index[0]], index[1:]) if index else None
            case "dynamic-update-slice":
                return at.operands[1], ()
            case "fusion" | "while" | "call" | "conditional":
                return self._root(at, index)
            case "copy-start":
                return at.operands[0], ()
        if at.opcode.endswith("-start"):
            return self._async(at, index)
        if at.opcode.endswith("-done") and at.operands:
            return at.operands[0], (1, *index)
        if at.opcode in _TRANSPARENT and at.operands:
            return at.operands[0], index
        if at.opcode in _MOVING and not _informative(at):
            return at.operands[0], ()
        if "op_name" not in at.metadata and at.operands:
            return self._largest(at.operands), ()
        return None

    def _caller(self, at: Instruction, index, seen):
        """From a parameter of a computation to what its caller puts there."""
        caller = self.hlo.instruction(self.hlo.callers.get(at.computation, ""))
        if caller is None:
            return None
        if caller.opcode != "while":
            number = min(at.element, len(caller.operands) - 1)
            return (caller.operands[number], index) if caller.operands else None
        root = self._root(caller, index)
        if root is None or root in seen or self._handed_on(root, at):
            return caller.operands[0], index
        return root

    def _handed_on(self, root, parameter: Instruction) -> bool:
        """Whether a loop's body hands this element on as it got it."""
        made = self.hlo.instruction(root[0])
        if made is None or made.opcode != "tuple" or not root[1]:
            return False
        element = self.hlo.instruction(made.operands[root[1][0]])
        return (
            element is not None
            and element.opcode == "get-tuple-element"
            and element.operands == (parameter.name,)
            and element.element == root[1][0]
        )

    def _root(self, at: Instruction, index):
        roots = [self.hlo.roots[c] for c in at.called if c in self.hlo.roots]
        return (roots[0], index) if roots else None

    def _async(self, at: Instruction, index):
        """`X-start` gives (operands, result, context)."""
        if index and index[0] == 1 and at.called:
            return self._root(at, index[1:])
        if at.operands:
            number = index[1] if len(index) > 1 else 0
            return at.operands[min(number, len(at.operands) - 1)], ()
        return None

    def _forward(self, at: Instruction, seen):
        """From the zeros a loop starts from to what its body puts there."""
        if at.opcode not in ("broadcast", "constant", "custom-call", "iota"):
            return None
        if at.opcode == "custom-call" and "AllocateBuffer" not in at.attributes:
            return None
        for name, index in seen:
            named = self._names(name, index)
            element = next((n for n in named if n in self.hlo.tuple_uses), None)
            if element is not None:
                start, position = self.hlo.tuple_uses[element]
                loop = self.hlo.instruction(self.hlo.loops[start])
                return self._root(loop, (position,)) if loop else None
        return None

    def _names(self, name: str, index: tuple[int, ...]) -> tuple[str, ...]:
        """What an operand list calls a value or its element."""
        if not index:
            return (name,)
        element = self.hlo.elements.get((name, index[0]), "")
        return element, f"{name}#{index[0]}"

    def _largest(self, operands: tuple[str, ...]) -> str:
        def size(name: str) -> int:
            found = self.hlo.instruction(name)
            return len(found.shape) if found and found.opcode != "constant" else 0

        return max(operands, key=size)


def _informative(instruction: Instruction) -> bool:
    op_name = instruction.metadata.get("op_name", "")
    return "/" in op_name and op_name.rsplit("/", 1)[-1] not in _BORING
