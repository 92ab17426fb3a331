"""Reads the scheduled HLO text that XLA dumps: instructions, callers, source lines.

The text is only indexed at first, and a line is parsed when it is asked for, so that a
dump of tens of megabytes takes about a second.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from jaxmem.memory.buffers.shapes import elements_of, integers

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CALLED = re.compile(
    r"(?:calls|body|to_apply|condition|called_computations|branch_computations"
    r"|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_ELEMENT = re.compile(r"get-tuple-element\([^%]*%([\w.\-]+)\), index=(\d+)")
# Newer XLA writes `%x#2` where older wrote a get-tuple-element instruction.
_NAME = re.compile(r"%([\w.\-]+(?:#\d+)*)")
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[\w.\-]+)')
_METADATA = re.compile(r"(?<!\w)metadata=\{")
# What a Pallas kernel says of itself, which XLA writes in lines of their own.
_OF_KERNEL = re.compile(r"kernel_metadata=\{\n(?:\"[^\n]*\n)*\}")
_PARTITIONS = re.compile(r"^HloModule .*num_partitions=(\d+)", re.MULTILINE)
# XLA:TPU wakes a sparse core with a start that has no operands; they come later.
_WOKEN = re.compile(r" async-update\(%([\w.\-]+), ")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclass(frozen=True)
class Location:
    """A source line and the function it is in."""

    file: str
    line: int
    function: str


_NOWHERE = Location("", 0, "")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    computation: str
    argument: str

    @cached_property
    def called(self) -> tuple[str, ...]:
        """The computations it calls, a while loop's body first."""
        body = re.search(r"body=%?([\w.\-]+)", self.attributes)
        if body:
            return (body.group(1),)
        groups = _CALLED.findall(self.attributes)
        return tuple(
            n.lstrip("%") for g in groups for n in re.findall(r"%?[\w.\-]+", g)
        )

    def listed(self, name: str) -> tuple[int, ...]:
        """The numbers of an attribute, as in `dimensions={0,2}`."""
        found = re.search(rf"(?<!\w){name}=\{{([\d,]*)\}}", self.attributes)
        return integers(found.group(1)) if found else ()

    @cached_property
    def metadata(self) -> dict[str, str]:
        """op_name, stack_frame_id, source_file and the like."""
        start = _METADATA.search(self.attributes)
        if start is None:
            return {}
        pairs = _FIELD.findall(_balanced(self.attributes, start.end() - 1, "{}"))
        return {key: value.strip('"').replace("\\'", "'") for key, value in pairs}

    @property
    def element(self) -> int:
        """The index a get-tuple-element takes, or a parameter's number."""
        match = re.search(r"index=(\d+)", self.attributes)
        return int(match.group(1) if match else self.argument or 0)


@dataclass
class Hlo:
    """An index of a module's text; `instruction(name)` parses one line."""

    lines: dict[str, tuple[str, str]] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)
    callers: dict[str, str] = field(default_factory=dict)
    entry: str = ""
    elements: dict[tuple[str, int], str] = field(default_factory=dict)
    loops: dict[str, str] = field(default_factory=dict)
    tables: dict[str, dict[int, str]] = field(default_factory=dict)
    parsed: dict[str, Instruction] = field(default_factory=dict)
    devices: int = 1  # that the module is partitioned for

    def instruction(self, name: str) -> Instruction | None:
        """The parsed line of that name, None where the text has none."""
        if name not in self.parsed and name in self.lines:
            self.parsed[name] = _parse_line(name, *self.lines[name])
        elif name not in self.parsed and "#" in name:
            self.parsed[name] = self._element(*name.rsplit("#", 1))
        return self.parsed.get(name)

    def _element(self, name: str, number: str) -> Instruction:
        """The get-tuple-element that `%x#2` stands for."""
        computation, _ = self.lines.get(name.split("#")[0], ("", ""))
        index = f"index={number}"
        opcode = "get-tuple-element"
        return Instruction(
            f"{name}#{number}", "", opcode, (name,), index, computation, ""
        )

    def condition(self, loop: Instruction) -> str:
        """The name of the computation that tells a while loop whether to go on."""
        found = _CONDITION.search(loop.attributes)
        return found.group(1) if found else ""

    @cached_property
    def computations(self) -> dict[str, tuple[str, ...]]:
        """The names of each computation's instructions, in their order."""
        found: dict[str, list[str]] = {}
        for name, (computation, _) in self.lines.items():
            found.setdefault(computation, []).append(name)
        return {computation: tuple(names) for computation, names in found.items()}

    def body(self, computation: str) -> Iterator[Instruction]:
        """The parsed instructions of a computation, in their order."""
        for name in self.computations.get(computation, ()):
            if (made := self.instruction(name)) is not None:
                yield made

    def shape_of(self, name: str) -> str:
        """The shape of a value; of `x#2` that of the element of a tuple."""
        base, *path = name.split("#")
        made = self.instruction(base)
        shape = made.shape if made else ""
        for index in path:
            shape = (*elements_of(shape), *[""] * (int(index) + 1))[int(index)]
        return shape

    @cached_property
    def tuple_uses(self) -> dict[str, tuple[str, int]]:
        """Value -> (tuple that a while loop starts with, its place in it)."""
        uses = {}
        for name in self.loops:
            carry = self.instruction(name)
            for i, operand in enumerate(carry.operands if carry else ()):
                uses.setdefault(operand, (name, i))
        return uses

    @cached_property
    def readers(self) -> dict[str, list[str]]:
        """Value -> the instructions that have it as an operand."""
        found: dict[str, list[str]] = defaultdict(list)
        for name, (_, rest) in self.lines.items():
            for operand in _NAME.findall(rest.partition(", metadata=")[0]):
                found[operand].append(name)
        return found

    @cached_property
    def frames(self) -> dict[int, tuple[int, int]]:
        """Stack frame id -> (file location id, parent's id, 0 at the top)."""
        raw = {i: _numbers(t) for i, t in self.tables.get("StackFrames", {}).items()}
        # Newer XLA counts parents from one, older from zero: only then can a
        # frame name itself.
        shift = any(n.get("parent_frame_id") == i for i, n in raw.items())
        return {
            i: (n.get("file_location_id", 0), n.get("parent_frame_id", 0) - shift)
            for i, n in raw.items()
        }

    def stack(self, instruction: Instruction) -> Iterator[Location]:
        """The source lines an instruction comes from, innermost first."""
        metadata = instruction.metadata
        if "source_file" in metadata:
            line = int(metadata.get("source_line", 0))
            yield Location(metadata["source_file"], line, "")
        frame, seen = int(metadata.get("stack_frame_id", 0)), set()
        while frame in self.frames and frame not in seen:
            seen.add(frame)
            location, frame = self.frames[frame]
            yield self._places.get(location, _NOWHERE)

    def source(self, instruction: Instruction) -> str:
        """Where an instruction is written, as `file:line (function)`, or ""."""
        place = next((where for where in self.stack(instruction) if where.file), None)
        return f"{place.file}:{place.line} ({place.function})" if place else ""

    @cached_property
    def _places(self) -> dict[int, Location]:
        """File location id -> the line."""
        of = lambda table: self.tables.get(table, {})
        files, functions, places = of("FileNames"), of("FunctionNames"), {}
        for number, text in of("FileLocations").items():
            ids = _numbers(text)
            file = files.get(ids.get("file_name_id", 0), "")
            function = functions.get(ids.get("function_name_id", 0), "")
            line = ids.get("line", 0)
            places[number] = Location(file.strip('"'), line, function.strip('"'))
        return places


def parse_hlo(text: str) -> Hlo:
    """Indexes the text of one HLO module."""
    hlo, computation, table = Hlo(), "", None
    if partitions := _PARTITIONS.search(text):
        hlo.devices = int(partitions.group(1))
    if "kernel_metadata={\n" in text:
        text = _OF_KERNEL.sub(lambda found: found.group().replace("\n", ""), text)
    for line in text.splitlines():
        if line.startswith("  "):
            _index_line(hlo, computation, line)
        elif line.endswith("{") and (header := _HEADER.match(line)):
            computation = header.group(2)
            hlo.entry = computation if header.group(1) else hlo.entry
        elif line in _TABLES:
            table = hlo.tables.setdefault(line, {})
        elif table is not None and line[:1].isdigit():
            number, _, rest = line.partition(" ")
            table[int(number)] = rest
    if " async-start()" in text:
        _start_with_operands(hlo)
    return hlo


def _start_with_operands(hlo: Hlo) -> None:
    """Has an asynchronous call start where it is given its operands.

    `%a = async-start(), calls=%f` and `%b = async-update(%a, %x)` become
    `%a = after-all()` and `%b = async-start(%x), calls=%f`.
    """
    for name, (computation, rest) in list(hlo.lines.items()):
        found = _WOKEN.search(rest)
        woken, start = hlo.lines.get(found.group(1), ("", "")) if found else ("", "")
        if found is None or " async-start()" not in start:
            continue
        shape, attributes = start.split(" async-start()", 1)
        before, after = rest[: found.start()], rest[found.end() :]
        hlo.lines[name] = computation, f"{before} async-start({after}{attributes}"
        hlo.lines[found.group(1)] = woken, f"{shape} after-all()"
        for called in re.findall(r" calls=%?([\w.\-]+)", attributes):
            hlo.callers[called] = name


def _index_line(hlo: Hlo, computation: str, line: str) -> None:
    head, _, rest = line.partition(" = ")
    name = head.strip().removeprefix("ROOT ").lstrip("%")
    hlo.lines[name] = (computation, rest)
    if head.startswith("  ROOT "):
        hlo.roots[computation] = name
    if " get-tuple-element(" in rest and (match := _ELEMENT.search(rest)):
        hlo.elements[match.group(1), int(match.group(2))] = name
    elif (at := rest.find(" while(")) >= 0 and (start := _NAME.search(rest, at)):
        hlo.loops[start.group(1)] = name
    for group in _CALLED.findall(rest):
        for called in re.findall(r"%?([\w.\-]+)", group):
            hlo.callers.setdefault(called, name)


def _parse_line(name: str, computation: str, rest: str) -> Instruction:
    """`SHAPE opcode(operands), attributes` as an Instruction."""
    shape = _balanced(rest, 0, "()") if rest.startswith("(") else rest.split(" ", 1)[0]
    call = rest[len(shape) :].lstrip()
    opcode, _, _ = call.partition("(")
    inside = _balanced(call, len(opcode), "()")
    attributes = call[len(opcode) + len(inside) :]
    operands = tuple(_NAME.findall(inside))
    return Instruction(
        name, shape, opcode, operands, attributes, computation, inside[1:-1]
    )


def _balanced(text: str, start: int, pair: str) -> str:
    """The text from the bracket at `start` to the one that closes it."""
    depth = 0
    for match in re.finditer(rf"[{re.escape(pair)}]", text[start:]):
        depth += 1 if match.group() == pair[0] else -1
        if depth == 0:
            return text[start : start + match.end()]
    return text[start:]


def _numbers(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}
