"""What the rules look at: a module, its values in their places, and their lives."""

import re
from collections.abc import Iterator
from functools import cached_property

from jaxmem.auditing._flow import Flow
from jaxmem.auditing._lives import Lives
from jaxmem.auditing._report import AuditFinding
from jaxmem.memory.buffers import parse_hlo
from jaxmem.memory.buffers.assignment import (
    Allocation,
    BufferValue,
    Key,
    parse_buffer_assignment,
)

_ALIASES = re.compile(r"input_output_alias=\{(.*?)\}(?:, \w+=|\n|$)")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")


class Module:
    """The text of a compiled module and that of its buffer assignment, read once."""

    def __init__(self, hlo: str, assignment: str):
        self.hlo = parse_hlo(hlo)
        allocations = parse_buffer_assignment(assignment)
        # what a thread has on its stack is no other one's, and a tuple is a table
        self.allocations = [a for a in allocations if a.kind != "thread-local"]
        self.values: dict[Key, BufferValue] = {
            v.key: v for a in allocations for v in a.values
        }
        self.flow = Flow(self.hlo, self.values)
        self.aliases = tuple(_aliases(hlo))

    @cached_property
    def lives(self) -> Lives:
        """When each value is alive."""
        return Lives(self.hlo, self.flow, frozenset(n for _, n in self.aliases))

    def data(self, allocation: Allocation) -> list[BufferValue]:
        """The arrays of an allocation."""
        return [v for v in allocation.values if v.size and v.shape[:1] != "("]

    @cached_property
    def _allocation_of(self) -> dict[Key, int]:
        return {v.key: a.number for a in self.allocations for v in a.values}

    def slot(self, value: BufferValue) -> tuple[int | None, int]:
        """(number of the allocation, offset in it) of a value."""
        return self._allocation_of.get(value.key), value.offset

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
            yield tuple(int(n) for n in place.split(",") if n.strip()), int(number)
