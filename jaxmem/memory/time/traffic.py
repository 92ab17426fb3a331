"""The bytes that a kernel of a compiled module reads and writes.

A slice counts as the slice, an update in place as what is updated, rows as rows. What a
fusion reads twice counts once. What lies in a TPU's vector memory counts apart. What a
collective moves is not counted: the link takes longer.
"""

import re
from collections import defaultdict
from collections.abc import Iterator

from jaxmem.cost.kernel import Traffic
from jaxmem.memory.buffers.collectives import KINDS
from jaxmem.memory.buffers.hlo import Hlo, Instruction
from jaxmem.memory.buffers.shapes import arrays_of, elements_of

_VIEWS = frozenset(
    "bitcast copy reshape get-tuple-element optimization-barrier".split()
)
_SLICES = frozenset("dynamic-slice slice gather".split())
_UPDATES = frozenset("dynamic-update-slice scatter".split())
_LIBRARY = 'custom_call_target="__cu'  # a call to cuBLAS or cuDNN
_WORKSPACE = re.compile(r"[su]8\[\d+\]")  # of which nobody knows how much is used
_DEVICE = 0  # the memory space whose traffic counts
_VECTOR = 1
HOST = 5


def traffic_of(hlo: Hlo, made: Instruction) -> Traffic:
    """The bytes that an instruction, if need be a fusion, reads and writes."""
    reads, host, near = [], 0, 0
    inside = _Inside(hlo, made.called[0]) if made.opcode == "fusion" else None
    results = tuple(_results(hlo, made) if inside is None else inside.results())
    moved = sum(a.bytes for one in results for a in arrays_of(one))
    for k, operand in enumerate(made.operands):
        reads.append((operand, _read(hlo, made, k, inside, _DEVICE)))
        near += _read(hlo, made, k, inside, _VECTOR)
        host += min(_bytes(hlo, operand, HOST), moved)
    written, away = 0, 0
    for one in results:
        written += sum(a.bytes for a in arrays_of(one) if a.space == _DEVICE)
        away += sum(a.bytes for a in arrays_of(one) if a.space == HOST)
        near += sum(a.bytes for a in arrays_of(one) if a.space == _VECTOR)
    return Traffic(tuple(reads), written, max(host, away), near)


def _read(
    hlo: Hlo, made: Instruction, k: int, inside: "_Inside | None", space: int
) -> int:
    """Bytes that an instruction reads of an operand's arrays in one memory."""
    whole = _bytes(hlo, made.operands[k], space)
    if not whole:
        return 0
    if inside is None:
        return min(whole, _read_by(hlo, made, k, space))
    return min(whole, inside.read(k, whole))


def _bytes(hlo: Hlo, name: str, space: int) -> int:
    return sum(a.bytes for a in arrays_of(hlo.shape_of(name)) if a.space == space)


def _read_by(hlo: Hlo, made: Instruction, k: int, space: int) -> int:
    """Bytes that one instruction reads of an operand in a memory."""
    if k == 0 and made.opcode in _SLICES:
        return sum(a.bytes for a in arrays_of(made.shape))
    if k == 0 and made.opcode in _UPDATES:
        return 0
    return _bytes(hlo, made.operands[k], space)


def _results(hlo: Hlo, made: Instruction) -> tuple[str, ...]:
    """The shapes of what one instruction writes."""
    if made.opcode == "dynamic-update-slice":
        return (hlo.shape_of(made.operands[1]),)
    if made.opcode == "scatter":  # rows are read, too, to add to them
        updates = made.operands[len(made.operands) // 2 + 1 :]
        return tuple(hlo.shape_of(u) for u in updates for _ in range(2))
    if made.opcode == "copy-start":  # what is copied, and a word, are named beside it
        return tuple(elements_of(made.shape)[:1])
    if made.opcode == "custom-call" and _LIBRARY in made.attributes:
        return tuple(s for s in elements_of(made.shape) if not _WORKSPACE.match(s))
    return (made.shape,)


class _Inside:
    """The computation of a fusion: which parameters it reads, and how."""

    def __init__(self, hlo: Hlo, computation: str):
        self.hlo = hlo
        self.parameters: dict[int, str] = {}
        self.users: dict[str, list[tuple[Instruction, int]]] = defaultdict(list)
        for made in hlo.body(computation):
            if made.opcode == "parameter":
                self.parameters[made.element] = made.name
            for k, operand in enumerate(made.operands):
                self.users[operand].append((made, k))
        root = hlo.instruction(hlo.roots.get(computation, ""))
        self.root = root

    def read(self, number: int, whole: int) -> int:
        """Bytes that are read of a parameter of `whole` bytes."""
        name = self.parameters.get(number)
        if name is None:
            return whole
        total = 0
        for made, k in self._uses(name):
            if made.opcode == "fusion":
                total += _Inside(self.hlo, made.called[0]).read(k, whole)
            elif k == 0 and made.opcode in _SLICES | _UPDATES:
                total += _read_by(self.hlo, made, k, _DEVICE)
            else:
                return whole
        return total

    def _uses(self, name: str) -> Iterator[tuple[Instruction, int]]:
        """What reads a value, through those that only look at it otherwise."""
        todo = list(reversed(self.users[name]))
        while todo:
            made, k = todo.pop()
            if self._looks_at(made, k) and made is not self.root:
                todo += reversed(self.users[made.name])
            elif made.opcode != "tuple" and made.opcode not in KINDS:
                yield made, k

    def _looks_at(self, made: Instruction, k: int) -> bool:
        """Whether as much of an operand is read as of what is made of it."""
        if made.opcode == "convert":
            return True
        sizes = {_all_bytes(self.hlo, name) for name in (made.name, made.operands[k])}
        return made.opcode in _VIEWS and len(sizes) == 1

    def results(self) -> Iterator[str]:
        """The shapes of what the fusion writes."""
        if self.root is None:
            return
        if self.root.opcode != "tuple":
            yield from self._written(self.root.name)
            return
        for name in self.root.operands:
            # a collective that goes on beside a fusion of libtpu has its arrays there
            made = self.hlo.instruction(name)
            if made is None or made.opcode not in ("parameter", *KINDS):
                yield from self._written(name)

    def _written(self, name: str) -> tuple[str, ...]:
        made = self.hlo.instruction(name)
        shape = self.hlo.shape_of(name)
        while made is not None and made.opcode in _VIEWS and made.operands:
            made = self.hlo.instruction(made.operands[0])
        if made is None or made.opcode == "parameter":
            return (shape,)
        if made.opcode == "fusion":
            return tuple(_Inside(self.hlo, made.called[0]).results())
        return _results(self.hlo, made) if made.opcode in _UPDATES else (shape,)


def _all_bytes(hlo: Hlo, name: str) -> int:
    return sum(a.bytes for a in arrays_of(hlo.shape_of(name)))
