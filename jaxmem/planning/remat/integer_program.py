"""The cheapest recomputation for a budget, by mixed-integer programming.

Stage t ends with the first run of operation t; before it, in the stage, earlier
operations may be repeated, in program order. The variables grow with the square of the
operations, so this is for some dozens. Source: Jain et al., "Checkmate"
(https://arxiv.org/abs/1910.02653), sections 4.1 to 4.8 and 5.1; overwriting is added.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_array

from jaxmem.planning.remat.sequence import SequenceTables, staged, with_missing

GAP = 1e-6  # relative difference to which optimality is proven


@dataclass(frozen=True)
class ProgramResult:
    """The result of the solver."""

    sequence: np.ndarray | None  # the cheapest found, or None
    bound: float  # a lower bound of the cost of the repeats, in sequences of this kind
    proven: bool  # whether nothing is cheaper than the sequence, or than the known one


def solve_program(
    tables: SequenceTables,  # a graph without aliases
    cost: np.ndarray,  # of each operation
    budget: float,  # bytes
    time_limit: float,  # seconds
    most: float = np.inf,  # the cost of a known sequence: only cheaper ones count
) -> ProgramResult:
    """The cheapest sequence within the budget."""
    model = _IntegerProgram(tables, cost, budget)
    model.at_most(most)
    result = model.solve(time_limit)
    if result.status == 2:
        return ProgramResult(None, most, True)
    bound = getattr(result, "mip_dual_bound", None)
    bound = 0.0 if bound is None else max(0.0, float(bound)) * model.unit
    if result.x is None:
        return ProgramResult(None, bound, False)
    return ProgramResult(model.sequence(result.x), bound, result.status == 0)


def rounded(
    tables: SequenceTables, cost: np.ndarray, budget: float, time_limit: float
) -> list[np.ndarray]:
    """Sequences from the linear relaxation, rounded at several thresholds."""
    # The kept values are rounded; the repeats follow from them. The sequences may
    # exceed the budget.
    model = _IntegerProgram(tables, cost, budget)
    result = model.solve(time_limit, relaxed=True)
    if result.x is None:
        return []
    return [model.sequence(result.x, above) for above in (0.3, 0.4, 0.5, 0.6, 0.7)]


class _IntegerProgram:
    """The program; variables are numbered in the order of their creation."""

    def __init__(self, tables: SequenceTables, cost: np.ndarray, budget: float):
        self._tables, self._count = tables, len(tables.makes)
        self.unit = float(cost.max(initial=0.0)) or 1.0  # counts as 1 in the objective
        self._bytes = max(float(budget), 1.0)  # the unit of bytes, against rounding
        self._whole: list[int] = []
        self._cost: list[float] = []
        self._entries: list[tuple[int, int, float]] = []
        self._limits: list[tuple[float, float]] = []
        self._recomputable: dict[tuple[int, int], int] = {}
        self._kept: dict[tuple[int, int], int] = {}
        self._readers = tables.graph.readers
        self._variables(cost)
        for t in range(self._count):
            self._sound(t)
            self._memory(t)

    def _variable(self, whole: bool = True, cost: float = 0.0) -> int:
        """A variable from 0 to 1."""
        self._whole.append(int(whole))
        self._cost.append(cost)
        return len(self._whole) - 1

    def _row(self, terms, low: float, high: float) -> None:
        """low <= sum of factor * variable <= high."""
        row = len(self._limits)
        self._entries.extend((row, x, f) for x, f in terms)
        self._limits.append((low, high))

    def _variables(self, cost) -> None:
        tables = self._tables
        for t in range(self._count):
            for i in range(t):
                if tables.recomputable[i]:
                    self._recomputable[t, i] = self._variable(cost=cost[i] / self.unit)
        held = set(tables.held.tolist())
        for t in range(1, self._count + 1):
            for i in range(t):
                kept = (v for v in tables.makes[i] if self._may_be_kept(t, v, held))
                for v in kept:
                    self._kept[t, v] = self._variable()
        for v in held:
            self._row([(self._kept[self._count, v], 1.0)], 1.0, 1.0)

    def _may_be_kept(self, t: int, v: int, held: set[int]) -> bool:
        """Whether somebody may read the value in stage t or later."""
        if v in held:
            return True
        later = self._readers[v] and self._readers[v][-1] >= t
        return t < self._count and bool(later or self._may_be_reread(v))

    def _may_be_reread(self, v: int) -> bool:
        """Whether a repeat may read the value."""
        return any(self._tables.recomputable[i] for i in self._readers[v])

    def _done(self, t: int, i: int) -> tuple[list[tuple[int, float]], float]:
        """Whether operation i runs in stage t: terms, and a constant."""
        if i == t:
            return [], 1.0
        x = self._recomputable.get((t, i))
        return ([], 0.0) if x is None else ([(x, 1.0)], 0.0)

    def _stays(self, t: int, v: int) -> list[tuple[int, float]]:
        x = self._kept.get((t, v))
        return [] if x is None else [(x, 1.0)]

    def _sound(self, t: int) -> None:
        """Inputs are in memory, and so was what is kept for the next stage."""
        tables = self._tables
        for i in range(t + 1):
            if i < t and (t, i) not in self._recomputable:
                continue
            done, always = self._done(t, i)
            for u in tables.reads[i]:
                made, _ = self._done(t, int(tables.maker[u]))
                terms = made + self._stays(t, u) + [(x, -f) for x, f in done]
                self._row(terms, always, np.inf)
            self._keeps(t, i, done, always)
        for i in range(t):
            if (t, i) not in self._recomputable:
                self._keeps(t, i, [], 0.0)

    def _keeps(
        self, t: int, i: int, done: list[tuple[int, float]], always: float
    ) -> None:
        """What an operation made is kept for the next stage if it is there in this."""
        for v in self._tables.makes[i]:
            if (t + 1, v) in self._kept:
                terms = [*done, *self._stays(t, v), (self._kept[t + 1, v], -1.0)]
                self._row(terms, -always, np.inf)

    def _memory(self, t: int) -> None:
        """The bytes alive while each operation of the stage runs are in the budget."""
        tables, scale = self._tables, 1.0 / self._bytes
        alive = [
            (x, tables.size[v] * scale)
            for i in range(t)
            for v in tables.makes[i]
            for x, _ in self._stays(t, v)
        ]
        before = None
        for i in range(t + 1):
            if i < t and (t, i) not in self._recomputable:
                continue
            done, always = self._done(t, i)
            made = float(sum(tables.size[v] for v in tables.makes[i])) * scale
            scratch = tables.graph.operations[i].scratch * scale
            freed = self._freed(t, i)
            overwritten = self._overwritten(t, i, freed)
            # `before` is a variable: the bytes alive after the previous operation.
            so_far = alive if before is None else [(before, 1.0)]
            terms = so_far + [(x, f * (made + scratch)) for x, f in done]
            terms += [(x, -f * scale) for x, f in overwritten]
            self._row(terms, -np.inf, 1.0 - always * (made + scratch))
            after = self._variable(whole=False)
            terms = so_far + [(x, f * made) for x, f in done] + [(after, -1.0)]
            terms += [(x, -tables.size[v] * scale) for v, x in freed.items()]
            self._row(terms, -always * made, -always * made)
            before = after

    def _freed(self, t: int, i: int) -> dict[int, int]:
        """Value -> a variable: nothing needs it after operation i in stage t."""
        tables, found = self._tables, {}
        for v in [*tables.reads[i], *tables.makes[i]]:
            x = found[v] = self._variable()
            done, always = self._done(t, i)
            if not always:
                self._row([(x, 1.0), *((d, -f) for d, f in done)], -np.inf, 0.0)
            stays = self._stays(t + 1, v)
            if stays:
                self._row([(x, 1.0), *stays], -np.inf, 1.0)
            for j in self._readers[v]:
                if i < j <= t:
                    later, certain = self._done(t, j)
                    if later or certain:
                        self._row([(x, 1.0), *later], -np.inf, 1.0 - certain)
        return found

    def _overwritten(
        self, t: int, i: int, freed: dict[int, int]
    ) -> list[tuple[int, float]]:
        """Variables and bytes of the pairs that operation i overwrites."""
        # Each output and each input is in one pair at most.
        size, pairs = self._tables.size, []
        of: dict[tuple[str, int], list[int]] = {}
        for v, u in self._tables.graph.operations[i].in_place:
            if u not in freed:
                continue
            x = self._variable()
            self._row([(x, 1.0), (freed[u], -1.0)], -np.inf, 0.0)
            of.setdefault(("output", v), []).append(x)
            of.setdefault(("input", u), []).append(x)
            pairs.append((x, float(min(size[v], size[u]))))
        for group in of.values():
            if len(group) > 1:
                self._row([(x, 1.0) for x in group], -np.inf, 1.0)
        return pairs

    def at_most(self, cost: float) -> None:
        """Adds the constraint that the repeats cost no more than this."""
        if np.isfinite(cost):
            terms = [(x, self._cost[x]) for x in self._recomputable.values()]
            self._row(terms, -np.inf, cost / self.unit * (1 + GAP))

    def solve(self, time_limit: float, relaxed: bool = False) -> OptimizeResult:
        rows, columns, factors = zip(*self._entries, strict=True)
        shape = (len(self._limits), len(self._whole))
        matrix = csr_array((factors, (rows, columns)), shape=shape)
        low, high = zip(*self._limits, strict=True)
        return milp(
            np.array(self._cost),
            integrality=np.zeros(shape[1]) if relaxed else np.array(self._whole),
            bounds=Bounds(np.zeros(shape[1]), np.ones(shape[1])),  # pyright: ignore
            constraints=LinearConstraint(matrix, np.array(low), np.array(high)),  # pyright: ignore
            options={"time_limit": time_limit, "mip_rel_gap": GAP},
        )

    def sequence(self, x: np.ndarray, above: float = 0.5) -> np.ndarray:
        """The sequence that keeps the values whose variables exceed `above`."""
        tables = self._tables
        kept: list[set[int]] = [set() for _ in range(self._count + 1)]
        for (t, v), column in self._kept.items():
            if x[column] > above:
                kept[t].add(v)
        stages = []
        for t in range(self._count):
            makers = {int(tables.maker[v]) for v in kept[t + 1] - kept[t]}
            stages.append(with_missing(tables, makers | {t}, set(kept[t])))
        return staged(tables, stages, kept[:-1])
