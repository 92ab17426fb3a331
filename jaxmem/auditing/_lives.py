"""When each value is alive, from the schedule in the module's text.

The compiler's own list of live ranges is what it shared memory by, and a fault in it is
one that has to be found. So they are counted here a second time: each instruction has a
position, each value the positions at which it is read.
"""

from dataclasses import dataclass, field

from jaxmem.auditing._flow import SILENT, Flow
from jaxmem.memory.buffers import Hlo, Instruction
from jaxmem.memory.buffers.assignment import Key

_CALLS = ("while", "conditional", "call", "async-start")


@dataclass(frozen=True)
class ControlSpan:
    """The positions of a loop, or of a conditional with those of its branches."""

    start: int
    end: int
    branches: tuple[tuple[int, int], ...] = ()

    def holds(self, position: int) -> bool:
        return self.start <= position <= self.end


@dataclass
class Lives:
    """Positions of a module's instructions, and what is alive when (both ends too)."""

    hlo: Hlo
    flow: Flow
    donated: frozenset[int]  # parameters whose memory may be written
    position: dict[str, int] = field(default_factory=dict)
    made_at: dict[int, Instruction] = field(default_factory=dict)
    uses: dict[Key, list[int]] = field(default_factory=dict)
    loops: list[ControlSpan] = field(default_factory=list)
    conditionals: list[ControlSpan] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)  # of asynchronous operations
    clock: int = 0

    def __post_init__(self) -> None:
        _, end = self._computation(self.hlo.entry)
        for made in self.hlo.body(self.hlo.entry):
            # the caller still has what it does not donate
            if made.opcode == "parameter" and made.element not in self.donated:
                for key in self.flow.leaves(made.name):
                    self.uses.setdefault(key, []).append(end)

    def alive(self, key: Key) -> list[tuple[int, int]]:
        """The stretches of the schedule in which a value is alive."""
        start = self.position.get(key[0])
        if start is None:
            return []
        return self._stretches(start, self._repeated(start, self.uses.get(key, ())))

    def _repeated(self, start: int, uses) -> list[int]:
        """A loop reads what is made outside of it until it ends."""
        loops = [loop for loop in self.loops if not loop.holds(start)]
        ends = lambda use: (loop.end for loop in loops if loop.holds(use))
        return [max((use, *ends(use))) for use in uses]

    def _stretches(self, start: int, uses: list[int]) -> list[tuple[int, int]]:
        """Of branches one runs: what another one reads need not outlive it."""
        last = max((start, *uses))
        around = (c for c in self.conditionals if c.holds(last) and c.start > start)
        outer = min(around, key=lambda c: c.start, default=None)
        if outer is None or last == outer.end:
            return [(start, last)]
        found = [(start, outer.start)]
        for first, end in outer.branches:
            if inside := [use for use in uses if first <= use <= end]:
                found += self._stretches(first, inside)
        return found

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _computation(self, name: str, whole: bool = False) -> tuple[int, int]:
        """Runs a computation; `whole` keeps its arguments until its end."""
        start, kept = self._tick(), []
        for made in self.hlo.body(name):
            if made.opcode == "parameter":
                self.position[made.name] = start
                kept += self.flow.leaves(made.name) if whole else ()
            else:
                self._instruction(made)
        end = self._tick()
        for key in (*self.flow.leaves(self.hlo.roots.get(name, "")), *kept):
            self.uses.setdefault(key, []).append(end)
        return start, end

    def _instruction(self, made: Instruction) -> None:
        kind = made.opcode
        start = self._tick()
        if kind == "while":
            self._read(made, start)
            self._loop(made, start)
        elif kind == "conditional":
            self._read(made, start, made.operands[:1])
            spans = tuple(self._computation(branch) for branch in made.called)
            self.conditionals.append(ControlSpan(start, self._tick(), spans))
        elif kind == "call" or kind == "async-start":
            self._read(made, start)
            self._computation(made.called[0])
            self._tick()
        self.position[made.name] = self.clock
        self.made_at[self.clock] = made
        if kind.endswith("-done"):
            begun = self.hlo.instruction(made.operands[0].split("#")[0])
            self._read(made, self.clock)
            if begun is not None:
                self.ends[begun.name] = self.clock
                self._read(begun, self.clock)
        elif kind not in SILENT and kind not in _CALLS:
            self._read(made, self.clock)

    def _loop(self, made: Instruction, start: int) -> None:
        test = self.hlo.condition(made)
        if test:
            self._computation(test, whole=True)
        self._computation(made.called[0])
        self.loops.append(ControlSpan(start + 1, self._tick()))

    def _read(self, made: Instruction, at: int, operands=None) -> None:
        for name in made.operands if operands is None else operands:
            for key in self.flow.leaves(name):
                self.uses.setdefault(key, []).append(at)
