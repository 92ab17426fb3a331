"""The smallest program that still shows a growth of temporaries: delta debugging.

After Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input" (2002):
ever smaller groups of outputs and equations are left out, and each smaller program is
compiled. It is not minimal over all programs: no two equations are joined, and no axis
is made shorter.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property

from jaxmem.diffing._program import Program

SHARE = 0.5  # of the growth, that a smaller program has to show


@dataclass(frozen=True)
class Unit:
    """An output or an equation by its number before and after; None where it is not."""

    kind: str
    numbers: tuple[int | None, int | None]


@dataclass(frozen=True)
class ProgramPair:
    """A program before and after; where both compilers get the same, it is one."""

    before: Program
    after: Program

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """What can be left out: outputs, then equations from the last on.

        First what both have, of both; then what one of them has alone.
        """
        outputs = _units("output", self.before.outputs, self.after.outputs)
        equations = _units("equation", self.before.equations, self.after.equations)
        units = [*outputs, *reversed(equations)]
        return tuple(sorted(units, key=lambda unit: None in unit.numbers))

    @cached_property
    def texts(self) -> tuple[str, str]:
        """Both as plain JAX."""
        before = self.before.text()
        return before, before if self.before is self.after else self.after.text()

    def without(self, units: Sequence[Unit], bypass: bool) -> "ProgramPair":
        """The pair without these, and without what nobody needs then."""
        before = _without(self.before, units, 0, bypass)
        if self.before is self.after:
            return ProgramPair(before, before)
        return ProgramPair(before, _without(self.after, units, 1, bypass))


@dataclass(frozen=True)
class ReducedPair:
    """What `reduced` found.

    Attributes:
      pair: the smallest programs.
      before: bytes of temporaries of the first.
      after: of the second.
      finished: whether nothing more can be left out; else the time was over.
    """

    pair: ProgramPair
    before: int
    after: int
    finished: bool


def reduced(
    pair: ProgramPair, sizes: Callable[[tuple[str, str]], tuple[int, int]], limit: float
) -> ReducedPair:
    """The smallest pair of programs that shows at least half of the growth.

    Args:
      pair: the programs.
      sizes: compiles their texts; bytes of temporaries before and after.
      limit: seconds after which the smallest so far is taken.

    Raises:
      ValueError: the temporaries do not grow.
    """
    found = sizes(pair.texts)
    growth, end = found[1] - found[0], time.monotonic() + limit
    if growth <= 0:
        raise ValueError(
            f"nothing to reduce: written as plain JAX, the step has {found[0]:,} bytes "
            f"of temporaries before and {found[1]:,} after"
        )
    search = _Reducing(pair, found, growth, sizes, end)
    # what an equation computes becomes an argument first, and then one of its operands
    finished = search.leave_out(bypass=False) and search.leave_out(bypass=True)
    return ReducedPair(search.pair, *search.found, finished)


@dataclass
class _Reducing:
    """The smallest pair so far, its bytes, and what has been compiled."""

    pair: ProgramPair
    found: tuple[int, int]
    growth: int
    sizes: Callable[[tuple[str, str]], tuple[int, int]]
    end: float
    tried: set[tuple[str, str]] = field(default_factory=set)

    def leave_out(self, bypass: bool) -> bool:
        """Leaves out ever smaller groups of units; whether there was time for all."""
        size = len(self.pair.units)
        while size:
            at, smaller = 0, False
            while at < len(self.pair.units):
                if time.monotonic() > self.end:
                    return False
                if self._without(self.pair.units[at : at + size], bypass):
                    smaller = True
                else:
                    at += size
            size = size if size == 1 and smaller else size // 2
        return True

    def _without(self, units: Sequence[Unit], bypass: bool) -> bool:
        """Takes the pair without these, if it shows the growth."""
        try:
            smaller = self.pair.without(units, bypass)
            less = len(smaller.units) < len(self.pair.units)
            if not less or smaller.texts in self.tried:
                return False
            self.tried.add(smaller.texts)
            found = self.sizes(smaller.texts)
        except Exception:  # it is no program, or does not compile: it shows nothing
            return False
        if not SHARE * self.growth <= found[1] - found[0] <= self._most(units):
            return False
        self.pair, self.found = smaller, found
        return True

    def _most(self, units: Sequence[Unit]) -> float:
        """How large the growth may be without these."""
        # Of two programs the first made smaller would show a growth by itself.
        if self.pair.before is self.pair.after:
            return math.inf
        of_first = any(unit.numbers[1] is None for unit in units)
        return self.found[1] - self.found[0] if of_first else self.growth


def _units(kind: str, before: Sequence, after: Sequence) -> list[Unit]:
    """What both sequences have, in their order, and what one of them has alone."""
    if before is after:
        return [Unit(kind, (i, i)) for i in range(len(before))]
    found: list[Unit] = []
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal":
            pairs = zip(range(i, i_end), range(j, j_end), strict=True)
            found += [Unit(kind, pair) for pair in pairs]
        else:
            found += [Unit(kind, (n, None)) for n in range(i, i_end)]
            found += [Unit(kind, (None, n)) for n in range(j, j_end)]
    return found


def _without(
    program: Program, units: Sequence[Unit], side: int, bypass: bool
) -> Program:
    numbers = lambda kind: {
        n for u in units if (n := u.numbers[side]) is not None and u.kind == kind
    }
    outputs = [*range(len(program.outputs))]
    kept = [i for i in outputs if i not in numbers("output")]
    return Program.of_text(program.text("step", numbers("equation"), kept, bypass))
