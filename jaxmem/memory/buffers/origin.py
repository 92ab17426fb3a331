"""Traces a buffer back to the operation that computes what is in it.

To XLA, a buffer of stacked residuals is a zero-filled array that a while loop carries
and updates in place. The trace goes through loops, fusions, tuples and updates.
"""

from dataclasses import dataclass
from pathlib import PurePath

from jaxmem import _compat
from jaxmem._module_path import OpName, parse_op_name
from jaxmem.memory.buffers.hlo import Hlo, Instruction, Location
from jaxmem.memory.buffers.rows import group_of

_TRANSPARENT = frozenset(
    "bitcast copy reshape bitcast-convert optimization-barrier copy-done"
    " all-gather-done all-reduce-done collective-permute-done send-done".split()
)
# These only move data. The trace ends at one that the user wrote.
_MOVING = frozenset("transpose convert slice dynamic-slice".split())
_UNINFORMATIVE = frozenset(
    "dynamic_update_slice dynamic_slice broadcast_in_dim while closed_call body"
    " jit(dynamic_index_in_dim) jit(dynamic_update_index_in_dim) squeeze copy"
    " reshape call_exported".split()
)
_VERBS = {"convert": "cast", "slice": "slice", "dynamic-slice": "slice"}
_STEPS = 400  # after which a trace gives up


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
        """The Python function, without where it is defined; or a script's file."""
        if self.location is None:
            return ""
        if self.location.function == "<module>":
            return PurePath(self.location.file).name
        return self.location.function.replace(".<locals>", "")

    @property
    def group(self) -> str:
        """The label of its group in a report."""
        return group_of(self.name.module_path, self.function, self.name.operation)


NOWHERE = Origin(parse_op_name(""), "", None)


class Tracer:
    """Origins of the values of one module, each traced once."""

    def __init__(self, hlo: Hlo):
        self.hlo = hlo
        self._known: dict[tuple[str, tuple[int, ...]], Origin] = {}
        self._kernels: dict[str, Origin] = {}

    def origin(self, name: str, index: tuple[int, ...] = ()) -> Origin:
        """The operation that computes the array `name{index}`."""
        key = name, index
        if key not in self._known:
            self._known[key] = self._trace(name, index)
        return self._known[key]

    def kernel(self, name: str) -> Origin:
        """What an instruction was compiled from: its name, else what it computes."""
        if name not in self._kernels:
            self._kernels[name] = self._of_kernel(name)
        return self._kernels[name]

    def _of_kernel(self, name: str) -> Origin:
        made = self.hlo.instruction(name)
        if made is not None and _informative(made):
            return self._origin(made, made, "copy")
        return self.origin(name)

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
        # The end of the trace says most, unless it is an instruction that the compiler
        # has added, which has no name.
        chosen = (
            last if _informative(last) else best or self._reader(last, seen) or last
        )
        return self._origin(chosen, last, verb)

    def _reader(self, at: Instruction, seen) -> Instruction | None:
        """What reads an array that no line of the user's makes, as zeros to add to."""
        if at.opcode == "parameter" or self._location(at) is not None:
            return None
        made = [name for value in seen for name in self._names(*value)]
        names = [reader for name in made for reader in self.hlo.readers.get(name, ())]
        roots = (self.hlo.roots.get(c) for n in names for c in self._called(n))
        for name in (*names, *filter(None, roots)):
            found = self.hlo.instruction(name)
            if found and _informative(found) and self._location(found) is not None:
                return found
        return None

    def _called(self, name: str) -> tuple[str, ...]:
        instruction = self.hlo.instruction(name)
        return instruction.called if instruction else ()

    def _location(self, at: Instruction) -> Location | None:
        """The user's own line; that of a library, where there is none."""
        # never one of this package's, such as that through which a compile calls a step
        stack = [f for f in self.hlo.stack(at) if not _compat.is_own_file(f.file)]
        installed = lambda f: any(name in f.file for name in _compat.INSTALLED)
        return next((f for f in stack if not installed(f)), next(iter(stack), None))

    def _origin(self, named: Instruction, last: Instruction, verb: str) -> Origin:
        location = self._location(named)
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
        return self._to_operand(at, index) if at.operands else None

    def _to_operand(self, at: Instruction, index):
        """To the operand whose values an operation hands on; None if it computes."""
        if at.opcode.endswith("-done"):
            return at.operands[0], (1, *index)
        if at.opcode in _TRANSPARENT:
            return at.operands[0], index
        if at.opcode in _MOVING and not _informative(at):
            return at.operands[0], ()
        if "op_name" not in at.metadata:
            return self._largest(at.operands), ()
        return None

    def _caller(self, at: Instruction, index, seen):
        """From a parameter of a computation to the operand of its caller."""
        caller = self.hlo.instruction(self.hlo.callers.get(at.computation, ""))
        if caller is None:
            return None
        if caller.opcode != "while":
            number = min(at.element, len(caller.operands) - 1)
            return (caller.operands[number], index) if caller.operands else None
        root = self._root(caller, index)
        if root is None or root in seen or self._is_unchanged(root, at):
            return caller.operands[0], index
        return root

    def _is_unchanged(self, root, parameter: Instruction) -> bool:
        """Whether the body of a loop returns this element of its carry unchanged."""
        carry = self.hlo.instruction(root[0])
        if carry is None or carry.opcode != "tuple" or not root[1]:
            return False
        element = self.hlo.instruction(carry.operands[root[1][0]])
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
        """The result of `X-start` is (operands, result, context)."""
        if index and index[0] == 1 and at.called:
            return self._root(at, index[1:])
        if at.operands:
            number = index[1] if len(index) > 1 else 0
            return at.operands[min(number, len(at.operands) - 1)], ()
        return None

    def _forward(self, at: Instruction, seen):
        """From the zeros that a loop starts with to what its body writes there."""
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
        """The names of a value, or of its element, in a list of operands."""
        if not index:
            return (name,)
        element = self.hlo.elements.get((name, index[0]), "")
        return element, f"{name}#{index[0]}"

    def _largest(self, operands: tuple[str, ...]) -> str:
        def size(name: str) -> int:
            operand = self.hlo.instruction(name)
            if operand is None or operand.opcode == "constant":
                return 0
            return len(operand.shape)

        return max(operands, key=size)


def _informative(instruction: Instruction) -> bool:
    op_name = instruction.metadata.get("op_name", "")
    return "/" in op_name and op_name.rsplit("/", 1)[-1] not in _UNINFORMATIVE
