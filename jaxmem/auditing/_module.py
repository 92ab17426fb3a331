"""What the rules look at: a module, its values in their places, and their lives."""

import re
from collections.abc import Iterator
from functools import cached_property

from jaxmem.auditing._flow import Flow
from jaxmem.auditing._lives import Lives
from jaxmem.auditing._report import AuditFinding
from jaxmem.auditing._sharding import ModuleShardings
from jaxmem.memory.buffers import Instruction, parse_hlo
from jaxmem.memory.buffers.assignment import (
    Allocation,
    BufferValue,
    Key,
    parse_buffer_assignment,
)
from jaxmem.memory.buffers.shapes import arrays_of, integers
from jaxmem.memory.compile import StepFacts

_ALIASES = re.compile(r"input_output_alias=\{(.*?)\}(?:, \w+=|\n|$)")
_CHOSEN = re.compile(r"allow_spmd_sharding_propagation_to_parameters=\{([\w,]*)\}")
_FLAG = re.compile(r"[su]32\[1?\]\{\S*S\(2\)\}")
_JOINED = "ConcatBitcast"
_PASSED = re.compile(r"output_to_operand_aliasing=\{(.*?)\}(?:, \w+=|$)")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")


class Module:
    """The text of a compiled module and that of its buffer assignment, read once."""

    def __init__(self, hlo: str, assignment: str, step: StepFacts | None = None):
        self.step = step or StepFacts()
        self.has_manual_parts = "shard_map" in hlo
        self.hlo = parse_hlo(hlo)
        allocations = parse_buffer_assignment(assignment)
        # what a thread has on its stack is no other one's, and a tuple is a table
        self.allocations = [a for a in allocations if a.kind != "thread-local"]
        self.values: dict[Key, BufferValue] = {
            v.key: v for a in allocations for v in a.values
        }
        self.flow = Flow(self.hlo, self.values)
        self.aliases = tuple(_aliases(hlo))
        found = _CHOSEN.search(hlo)
        self._chosen_by_compiler = found[1].split(",") if found else []

    @cached_property
    def lives(self) -> Lives:
        """When each value is alive."""
        return Lives(self.hlo, self.flow, frozenset(n for _, n in self.aliases))

    @cached_property
    def shardings(self) -> ModuleShardings:
        """How each value differs among devices."""
        shards = [
            None if self._may_be_cut(number) else one
            for number, one in enumerate(self.step.shards)
        ]
        return ModuleShardings(self.hlo, shards)

    def _may_be_cut(self, number: int) -> bool:
        """Whether the compiler chose a parameter's shards, and it is not whole."""
        chosen = self._chosen_by_compiler
        if number >= len(chosen) or chosen[number] != "true":
            return False
        for made in self.hlo.body(self.hlo.entry):
            if made.opcode == "parameter" and made.element == number:
                sizes = arrays_of(made.shape)[0].sizes
                return self.step.inputs[number : number + 1] != (sizes,)
        return True

    def data(self, allocation: Allocation) -> list[BufferValue]:
        """The arrays of an allocation, each once."""
        # The flags by which parts of a TPU wait for each other are none: one is free
        # again as soon as it is raised.
        values = [v for v in allocation.values if not _FLAG.fullmatch(v.shape)]
        arrays = [v for v in values if v.size and v.shape[:1] != "("]
        return [v for v in arrays if self.flow.value(*v.key) == v.key]

    @cached_property
    def _allocation_of(self) -> dict[Key, int]:
        return {v.key: a.number for a in self.allocations for v in a.values}

    def slot(self, value: BufferValue) -> tuple[int | None, int]:
        """(number of the allocation, offset in it) of a value."""
        return self._allocation_of.get(value.key), value.offset

    def passes_on(self, value: BufferValue) -> bool:
        """Whether it is what a TPU's asynchronous fusion hands to the next one.

        Such fusions are the start, the middle and the end of a collective, and all of
        them name its source and its target as outputs. Loops may stand between them.
        """
        loop = self._loop_of(value)
        if loop is not None:
            return self._returns(loop, value.index)
        return self._handed(value.key) is not None

    def _returns(self, loop: Instruction, index: tuple[int, ...]) -> bool:
        """Whether a loop's body hands on what it is given at a place."""
        given = self.flow.argument(loop), index
        key = self.flow.value(self.hlo.roots[loop.called[0]], index)
        while key is not None and key != given:
            key = self._handed(key)
        return key is not None

    def _handed(self, key: Key) -> Key | None:
        """The value that such a fusion, or a loop of them, hands on as this one."""
        name, index = key
        made = self.hlo.instruction(name)
        if made is not None and made.opcode == "while":
            given = self._returns(made, index)
            return self.flow.value(made.operands[0], index) if given else None
        if made is None or made.opcode != "fusion":
            return None
        if "async" not in f"{made.name} {' '.join(made.called)}":
            return None
        found = _PASSED.search(made.attributes)
        for place, number, inner in _ALIAS.findall(found[1]) if found else ():
            if integers(place) == index:
                return self.flow.value(made.operands[int(number)], integers(inner))
        return None

    def is_carried_twice(self, old: BufferValue, new: BufferValue) -> bool:
        """Whether a loop begins with one value at both places, and makes one of both.

        What the devices of a TPU know of each other goes through loops in many copies.
        """
        loop = self._loop_of(new)
        if loop is None or old.name != new.name:
            return False
        for one in (loop.operands[0], self.hlo.roots[loop.called[0]]):
            first = self.flow.value(one, old.index)
            if first is None or first != self.flow.value(one, new.index):
                return False
        return True

    def _loop_of(self, value: BufferValue) -> Instruction | None:
        """The loop of which it is a result, or what its body or test is given."""
        made = self.hlo.instruction(value.name)
        if made is not None and made.opcode == "parameter":
            made = self.hlo.instruction(self.hlo.callers.get(made.computation, ""))
        return made if made is not None and made.opcode == "while" else None

    def is_part(self, old: BufferValue, new: BufferValue) -> bool:
        """Whether a TPU's value consists of such that are there, as `old` is."""
        # It copies a large array to faster memory slice by slice. They are named in
        # the order in which they come, and fill the place of the whole one.
        made = self.hlo.instruction(new.name)
        if made is None or _JOINED not in made.attributes:
            return False
        keys = self.operands(new.name)
        places = sorted((v.offset, v.size) for k in keys if (v := self.values.get(k)))
        end = new.offset
        for offset, size in places:
            if offset != end:
                return False
            end += size
        return old.key in keys and end == new.offset + new.size

    def operands(self, name: str) -> set[Key]:
        """The values that an instruction reads."""
        made = self.hlo.instruction(name)
        names = made.operands if made else ()
        return {key for one in names for key in self.flow.leaves(one)}

    def described(self, name: str) -> tuple[str, str]:
        """(the name scopes and the operation, the line) of an instruction."""
        made = self.hlo.instruction(name)
        if made is None:
            return "", ""
        return made.metadata.get("op_name", ""), self.hlo.source(made)

    def finding(
        self, rule: str, instruction: str, what: str, way_round: str, report: str = ""
    ) -> AuditFinding:
        """What a rule found at an instruction, with its operation and line."""
        at = self.described(instruction)
        return AuditFinding(rule, what, instruction, *at, report, way_round)


def _aliases(text: str) -> Iterator[tuple[tuple[int, ...], int]]:
    """(place in the result, parameter) of each donated argument."""
    head = text[text.find("HloModule") :].split("\n", 1)[0]
    if found := _ALIASES.search(head):
        for place, number, _ in _ALIAS.findall(found.group(1)):
            yield integers(place), int(number)
