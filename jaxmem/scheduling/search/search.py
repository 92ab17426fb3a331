"""A traced step, compiled under several choices until one of them will do."""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from jaxmem.chips import CHIPS
from jaxmem.cost.host_traffic import waiting_for_host
from jaxmem.memory import CompileError, format_bytes, start_worker
from jaxmem.scheduling._candidate import Candidate
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling.order.candidates import of_sequences
from jaxmem.scheduling.order.ordered import OperationOrder
from jaxmem.scheduling.order.shrink_first import ShrinkFirst
from jaxmem.scheduling.recompute.barriers import Barriers
from jaxmem.scheduling.recompute.first_layers import seconds_of_gathers
from jaxmem.scheduling.recompute.front import SearchSpace, pareto_front, space_in
from jaxmem.scheduling.recompute.front_segments import in_segments
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.search.budget import BudgetSearch, may_shrink
from jaxmem.scheduling.search.compiles import Compiles, OtherOptions, OutOfTime
from jaxmem.scheduling.search.result import (
    BudgetError,
    ReportedTrial,
    SearchResult,
    best_of,
    by_peak,
    progress_of,
    trial_of,
    unreachable,
    wrong_values,
)
from jaxmem.scheduling.search.traced_step import OFF, TracedStep
from jaxmem.scheduling.tiling.micro_batch_front import (
    in_least_seconds,
    in_micro_batches,
    why_not,
)
from jaxmem.scheduling.tiling.micro_batches import MicroBatches
from jaxmem.scheduling.tiling.tiled_front import beside_sequences, with_tiles
from jaxmem.scheduling.tiling.tiles import Tiles
from jaxmem.scheduling.tiling.vocabulary_tiles import TileVocabulary, VocabularyTiles

# Of the own seconds: what products done twice must save. A predicted step is off by up
# to a tenth (`jaxmem.memory.StepTime`), so that two of them differ by twice that.
_CLEARLY = 0.2
_ALIKE = 0.98  # of a peak: an order that is predicted above it saves next to nothing
_REFUSED = 0.05  # of the budget, by which to stay below what was refused at the end
_CONFIRMED = 4  # compiles to the end for one budget
_MOST = 12  # compiles for one budget, once something fits
_KEPT = 2  # of them are kept for micro-batches


# candidates, or what finds them
Front = Sequence[Candidate] | Callable[[], Sequence[Candidate]]


def search(
    step: TracedStep,
    budget: int | None,
    tell: Callable[[str], None],
    named: bool = False,
    offload: bool = False,
    most: float | None = None,
    tile: bool = False,
    audit: bool = True,
) -> SearchResult:
    """The choice that fits a budget; without one, the one that takes least."""
    # Without a budget nothing that costs anything is recomputed. `named`: only what has
    # a `checkpoint_name` is kept. `offload`: what is kept may wait in the host's
    # memory. `tile`: regions may be run in tiles. `audit`: no choice is taken in whose
    # module something is found. After `most` seconds, or when interrupted, it is the
    # best so far.
    start = time.perf_counter()
    start_worker()
    deadline = None if most is None else time.monotonic() + most
    products = None
    while True:
        compiles = Compiles(step.begin, deadline, products)
        run = SearchRun(step, budget, tell, compiles, named, offload, tile, audit)
        try:
            best = run.best()
            _check_findings(best)
            break
        except OtherOptions as other:  # all once more, so that all are compiled alike
            products = other.products
        finally:
            compiles.close()
    return SearchResult(
        best.choice,
        budget,
        tuple(run.tried),
        time.perf_counter() - start,
        step.rewritten(best.choice),
        best.report,
        step.fingerprint,
        products,
        run.notes,
        stopped=run.stopped,
    )


def _check_findings(best: ReportedTrial) -> None:
    """CompileError if even the best computes something else than the step."""
    if best.findings:
        raise CompileError(wrong_values(best))


@dataclass
class SearchRun:
    """A search whose compiles all have the same options."""

    step: TracedStep
    budget: int | None
    tell: Callable[[str], None]
    compiles: Compiles
    named: bool = False
    offload: bool = False
    tile: bool = False
    audit: bool = True  # whether what the compiler made of a choice is looked at
    # what was compiled, in order
    tried: list[ReportedTrial] = field(default_factory=list)
    notes: tuple[str, ...] = ()  # what there is to say of how it ended
    stopped: bool = False  # whether that was before it was done
    _flat: Sequence[Candidate] = ()  # those in no segments and no tiles
    _found: dict[Choice, list[Candidate]] = field(default_factory=dict)  # sequences
    _tiled: bool = False  # whether there is something to cut
    _looked_at: Sequence[Candidate] = ()  # those of the last front
    # makes the candidates in tiles, see `with_tiles`
    _front: Callable[..., list[Candidate]] = lambda *args, **how: []
    # the same in micro-batches, see `in_micro_batches`
    _parts: Callable[..., list[Candidate]] = lambda *args, **how: []
    excess: int = 0  # bytes that a step took above what its assigned buffers had told

    @property
    def limit(self) -> float:
        """What assigned buffers may take."""
        return math.inf if self.budget is None else self.budget - self.excess

    def best(self) -> ReportedTrial:
        """What was asked for; the best so far where there is no time for more."""
        try:
            if self.budget is None:
                return self._least(self._free())
            return self._within(self.budget)
        except (KeyboardInterrupt, OutOfTime) as stop:
            late = isinstance(stop, OutOfTime)
            best = best_of(self.tried, self.limit)
            if best is None or math.isinf(best.peak):
                if late:
                    raise TimeoutError(self._too_late()) from None
                raise
            why = "out of time" if late else "interrupted"
            count = len(self.tried)
            text = f"the search was {why} after {count} compiles: the best so far"
            self.notes, self.stopped = (text,), True
            return self._settled(best)

    def _too_late(self) -> str:
        tried = len(self.tried)
        least = min((t.peak for t in self.tried), default=math.inf)
        text = f"search_seconds: nothing that fits was found in {tried} compiles"
        if math.isfinite(least):
            text += f"; the least of them is {format_bytes(least)}"
        return text + ": give it more time"

    def _within(self, budget: int) -> ReportedTrial:
        """What fits once it is compiled to the end."""
        for _ in range(_CONFIRMED):
            try:
                found = self._search(self.limit)
            except BudgetError:
                break
            best = self._settled(found)
            if best.peak <= budget:
                return best
            if math.isfinite(best.peak):
                self.excess = int(best.peak - found.peak)
            else:  # refused at the end, and the compiler does not say what would do
                self.excess = int(budget - found.peak) + int(_REFUSED * budget)
        best = self._least_settled()
        if best.peak <= budget:
            return best
        raise unreachable(budget, best, self._stopped(best.choice))

    def _least_settled(self) -> ReportedTrial:
        """The least of what was tried, all that may be it compiled to the end."""
        best, seen = None, set()
        for one in sorted(self.tried, key=by_peak):
            if best is not None and one.peak >= best.peak:
                break
            if one.peak not in seen:  # of those that are alike to the byte, the first
                seen.add(one.peak)
                found = self._settled(one)
                best = min(found, best or found, key=by_peak)
        assert best is not None
        return best

    def _stopped(self, choice: Choice) -> Sequence[str]:
        """What cannot be in tiles, and why."""
        if not self.tile:
            return ()
        made = self.step.rewritten(choice)
        done = (pair for record in made.records for pair in record.rewrites)
        tiles = (pair for pair in done if pair[0].config is Tiles)
        said = (one.describe(rewrite, self.step.target).notes for one, rewrite in tiles)
        notes = [note for notes in said for note in notes]
        every = VocabularyTiles(limit=0)
        left = lambda level: list(TileVocabulary().left(level, every))
        for record in made.records:
            notes += record.entered[VocabularyTiles].looked_at(left)
        return tuple(dict.fromkeys([*notes, *self._whole_batch]))

    def _least(self, choices: Sequence[Choice]) -> ReportedTrial:
        """The least peak of what sends no more than the step as it was given."""
        tried = sorted(self._compiled(choices), key=lambda t: t.peak)
        plain = self._settled(next(t for t in tried if t.choice.unchanged))
        for one in tried:
            found = plain if one.choice.unchanged else self._settled(one)
            if found.peak <= plain.peak and found.sent_bytes <= plain.sent_bytes:
                return found
        return plain

    def _settled(self, found: ReportedTrial) -> ReportedTrial:
        self.tell(f"compile to the end{progress_of(found)}")
        report = self.compiles.settled(found.choice)
        known = found.predicted, found.seconds, self.audit
        best = trial_of(found.choice, report, *known)
        self.tried = [best if t.choice == best.choice else t for t in self.tried]
        return best

    @functools.cached_property
    def _first(self) -> Rewritten:
        choice = Choice(self.step.target)
        if self.named:
            choice = choice.having(Recompute(named=True))
        return self.step.rewritten(choice)

    @functools.cached_property
    def _space(self) -> SearchSpace:
        target = self.step.target
        about = self._first.unordered, CHIPS[target].machine, self.step.spreads
        how = self.named, self.offload, waiting_for_host(*about)
        return space_in(self._first, *how)

    @functools.cached_property
    def _can_shrink_first(self) -> bool:
        # names cannot say it
        if self.named:
            return False
        choice = Choice(self.step.target, (ShrinkFirst(enabled=True),))
        return self.step.rewritten(choice).did(ShrinkFirst)

    @functools.cached_property
    def _behind_barriers(self) -> Choice | None:
        """What is recomputed without cost waits for its gradient, where it can."""
        choice = Choice(self.step.target, (Barriers(enabled=True),))
        return choice if self.step.rewritten(choice).did(Barriers) else None

    def _free(self) -> list[Choice]:
        """What costs nothing; the step as it was given where nothing is asked for."""
        default = Choice(self.step.target)
        free = [default]
        if self._space.is_unrolled:
            free.append(default.having(OperationOrder(planned=True)))
            free += filter(None, [self._behind_barriers])
        if self._can_shrink_first:
            free.append(default.having(ShrinkFirst(enabled=True)))
        if self.budget is None:
            free.append(replace(default, unchanged=True))
        return free

    def _compiled(self, choices: Sequence[Choice]) -> Iterator[ReportedTrial]:
        """These, two at a time."""
        for i, choice in enumerate(choices):
            best = best_of(self.tried, self.limit)
            self.tell(f"compile {len(self.tried) + 1}{progress_of(best)}")
            self.compiles.ahead(choices[i : i + 2])
            report = self.compiles(choice)
            self.tried.append(trial_of(choice, report, audit=self.audit))
            yield self.tried[-1]

    def _search(self, limit: float) -> ReportedTrial:
        """The fewest seconds whose assigned buffers are within a limit."""
        self.tried, self._looked_at = [], ()
        free = self._free() if self._space.is_unrolled else []
        if free:
            self.compiles.ahead(free[:1])
            free = [c for c in free if not self._is_vain(c, limit)]
        for one in self._compiled(free):
            if one.peak <= limit:
                return one
        best = min(self.tried, key=lambda t: t.peak, default=None)
        candidates = self._flat = self._candidates(best)
        self._tiled = False
        if not self.tile or self.named:
            return self._fitting([candidates, self._segments])
        # bytes of other candidates are those of what is kept, and not of peaks
        of_peaks = any(c.choice.get(OperationOrder).sequence for c in candidates)
        if best is None:
            best = self._first_trial(candidates[0].choice, limit)
            if best.peak <= limit:
                return best
        if self._is_near(best):
            with suppress(BudgetError):
                found = self._budget_search(candidates).run()
                if found.seconds <= self._slack:
                    return found
        front = beside_sequences if of_peaks else with_tiles
        self._front = partial(front, self.step, candidates)
        # what surely fits, by what the first one took
        above = best.peak - self.step.predicted(best.choice)
        few = self._front(self.limit / OFF - above)
        self._parts = partial(in_micro_batches, self.step)
        self._tiled = any(c.choice.get(Tiles) != Tiles() for c in few)
        fronts = [few, self._front, self._heads, self._segments]
        return self._fitting([*fronts, self._in_few_parts, self._in_many_parts])

    def _first_trial(self, choice: Choice, limit: float) -> ReportedTrial:
        """What costs nothing; with products that wait where that may help."""
        (plain,) = self._compiled([choice])
        if not self._can_shrink_first or not may_shrink(plain.peak, limit):
            return plain
        (waits,) = self._compiled([choice.having(ShrinkFirst(enabled=True))])
        return waits if waits.peak <= limit else plain

    @functools.cached_property
    def _slack(self) -> float:
        return self.step.slack()

    def _is_near(self, first: ReportedTrial) -> bool:
        """Whether hardly any recomputation is expected to do."""
        # Then tiles gain nothing that is worth looking for them.
        rest = first.peak - self._flat[0].bytes
        fits = (one for one in self._flat if one.bytes + rest <= self.limit)
        return next((one.seconds <= self._slack for one in fits), False)

    def _budget_search(
        self, candidates: Sequence[Candidate], most: int = _MOST - _KEPT
    ) -> BudgetSearch:
        """The search among these, with what is known of those that were tried."""
        peaks = {t.choice: t.peak for t in self.tried}
        numbered = enumerate(candidates)
        known = {i: peaks[c.choice] for i, c in numbered if c.choice in peaks}
        # what other fronts took above their predictions, at least
        bytes_of = {c.choice: c.bytes for c in self._looked_at}
        above = [peak - bytes_of[c] for c, peak in peaks.items() if c in bytes_of]
        self._looked_at = candidates
        how = self._space.layers, int(self.limit), self.compiles, self.tell
        more = {"slack": self._slack, "ahead": self.compiles.ahead, "most": most}
        more["audit"] = self.audit
        space = self._space
        more["gathers"] = lambda c: seconds_of_gathers(space.scans, c, space.target)
        about = candidates, *how, self._can_shrink_first, self.tried, known
        if candidates[0].choice.get(MicroBatches) != MicroBatches():
            above = [self._above]
        rest = None if known else min(above, default=None)
        return BudgetSearch(*about, rest, **more)

    def _fitting(self, fronts: Sequence[Front]) -> ReportedTrial:
        """What the first front finds that reaches the limit, or what is better still.

        Segments are better where they take less by the clock's estimate, and no more by
        the count of flops; heads over the vocabulary, which do products twice, where
        they take clearly less; micro-batches where they take less.
        """
        best = self._first_of(fronts)
        if not best.seconds:
            return best
        rows = self.step.rewritten(best.choice).description.recomputed
        work = sum(row.flops for row in rows)
        best = self._better(best, self._segments(best.seconds - self._slack, work))
        most = best.seconds - _CLEARLY * self.step.own_seconds()
        best = self._better(best, self._heads(most) if most > 0 else [])
        return self._or_in_parts(best)

    def _or_in_parts(self, best: ReportedTrial) -> ReportedTrial:
        """The best, or micro-batches that take less seconds."""
        if not self.tile or self.named:
            return best
        # their price counts what products write, and so must that of recomputation
        longer = lambda t: t.seconds + self.step.writing(t.choice)
        self.tried = [replace(t, seconds=longer(t)) for t in self.tried]
        best = next(t for t in self.tried if t.choice == best.choice)
        # what XLA takes above a prediction where most is kept says little of less
        room = self.limit - self.step.argument_bytes()
        found = in_least_seconds(self.step, room, best.seconds - self._slack)
        return self._better(best, self._noted(found), _MOST)

    def _first_of(self, fronts: Sequence[Front]) -> ReportedTrial:
        error, looked_at = None, []
        for front in fronts:
            candidates = front() if callable(front) else front
            if not candidates or candidates in looked_at:
                continue
            looked_at.append(candidates)
            try:
                return self._budget_search(candidates).run()
            except BudgetError as none:
                error = none
        assert error is not None
        raise error

    def _better(
        self,
        best: ReportedTrial,
        candidates: Sequence[Candidate],
        most: int = _MOST - _KEPT,
    ) -> ReportedTrial:
        """The best, or one of these that take less time, in `most` compiles in all."""
        try:
            return self._budget_search(candidates, most).run() if candidates else best
        except BudgetError:
            return best

    def _heads(self, most: float = math.inf) -> list[Candidate]:
        """Candidates with heads over the vocabulary, of less than `most` seconds."""
        return [one for one in self._front(heads=True) if one.seconds < most]

    def _in_few_parts(self) -> list[Candidate]:
        """Candidates in as few micro-batches as are predicted to fit."""
        room = self.limit / OFF - self._above
        return self._noted(self._parts(room, below=self._least_peak))

    def _in_many_parts(self) -> list[Candidate]:
        """Candidates in the number of them that is predicted to take least."""
        # whatever the budget is, so that the least there is does not depend on it
        return self._parts(-math.inf, below=self._least_peak)

    def _noted(self, found: list[Candidate]) -> list[Candidate]:
        """The same; if there are none, the plan says what forbids them."""
        self.notes = () if found or not self.tile else tuple(self._whole_batch)
        return found

    @property
    def _least_peak(self) -> float:
        """What candidates have to be predicted below, where nothing fits."""
        return min(t.peak for t in self.tried) - self._above

    @functools.cached_property
    def _whole_batch(self) -> list[str]:
        return why_not(self.step)

    @property
    def _above(self) -> float:
        """Bytes of a peak above its prediction, by what was compiled first."""
        first = next((t for t in self.tried if math.isfinite(t.peak)), None)
        if first is None:  # the chip is too small for all of them
            return self.step.argument_bytes()
        return first.peak - self.step.predicted(first.choice)

    def _segments(
        self, most: float = math.inf, work: float = math.inf
    ) -> list[Candidate]:
        """Candidates in segments of layers, in tiles where there are any.

        They take less than `most` seconds, and no more than `work` flops.
        """
        is_less = lambda one: one.seconds < most and one.flops <= work
        found = in_segments(self._space, self._flat)
        if self._tiled and any(map(is_less, found)):  # tiles take none of either
            found = with_tiles(self.step, found)
        return list(filter(is_less, found))

    def _is_vain(self, choice: Choice, limit: float) -> bool:
        """Whether it is an order that neither fits nor tells more than the first."""
        # Where it is far from the limit, what may be recomputed is looked for at once,
        # while the first choice is compiled. XLA:GPU merges products there, which it
        # cannot do across the barriers of an order.
        if not choice.get(OperationOrder).planned:
            return False
        there, peak = self.step.sizes_of(self._first.unordered)
        if there + peak <= OFF * limit:
            return False
        base = self._behind_barriers or Choice(self.step.target)  # most likely the best
        least = self._sequences(base)[0].bytes
        return there + least > OFF * limit and least > _ALIKE * peak

    def _sequences(self, base: Choice) -> list[Candidate]:
        if base not in self._found:
            left = self.compiles.left() / 2
            self._found[base] = of_sequences(self.step, base, left)
        return self._found[base]

    def _candidates(self, best: ReportedTrial | None) -> list[Candidate]:
        """The choices to try; the first is the best of those that cost nothing."""
        if best is None:
            return pareto_front(self._space)
        barriers = best.choice.get(Barriers)  # where they pay, they pay for all
        candidates = self._sequences(Choice(self.step.target, (barriers,)))
        if len(candidates) == 1:  # the lists are in loops over micro-batches
            front = pareto_front(self._space)
            having = lambda one: replace(one, choice=one.choice.having(barriers))
            candidates = list(map(having, front))
        return [replace(candidates[0], choice=best.choice), *candidates[1:]]
