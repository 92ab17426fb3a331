"""A traced step, compiled under several choices until one of them will do."""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxmem import _jaxpr
from jaxmem.frameworks import Place
from jaxmem.ir.costs import MACHINES, flops, seconds
from jaxmem.memory import MemoryReport, Pending, begin, format_bytes, start_worker
from jaxmem.scheduling._arguments import jit_with
from jaxmem.scheduling._choice import NAMED, NO_CHOICE, Choice
from jaxmem.scheduling._passes import Aliases, Rewritten
from jaxmem.scheduling.order.planned import PATIENCE, sequences
from jaxmem.scheduling.plan.plan import Plan
from jaxmem.scheduling.predict.operations import compiled_peak, operations_of
from jaxmem.scheduling.predict.tpu import is_tpu
from jaxmem.scheduling.search.budget import (
    BudgetError,
    Search,
    Tried,
    best_of,
    compiled,
    saved,
    unreachable,
)
from jaxmem.scheduling.search.compiles import Candidates, OtherOptions, OutOfTime
from jaxmem.scheduling.search.front import Rung, Step, ladder, step_of
from jaxmem.scheduling.search.front_segments import in_segments

_ENOUGH = 0.02  # of the step's own seconds: less is not worth another compile
_FAR = 1.1  # of the budget: what is predicted above it will not fit
_LESS = 0.95  # of the seconds: for more, segments are not looked at
_CONFIRMED = 4  # compiles to the end for one budget
_REMEMBERED = 8  # steps

_SEQUENCES: dict[tuple[str, str], list[Rung]] = {}  # by fingerprint and target


@dataclass(frozen=True)
class Found:
    """The choice for some arguments, and what a search has seen on the way to it."""

    choice: Choice
    budget: int | None = None
    tried: tuple[Tried, ...] = ()
    seconds: float = 0.0
    rewritten: Rewritten | None = None
    report: MemoryReport | None = None
    fingerprint: str = ""
    products: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evaluated:
    """A step traced once, to be compiled under several choices."""

    rewritten: Callable[[Choice], Rewritten]
    aliases: Callable[[Any], Aliases]
    out_tree: Any
    given: Callable
    donated: tuple[Place, ...]
    args: tuple
    kwargs: dict[str, Any]
    target: str
    fingerprint: str
    compiler_options: dict[str, Any] | None = None

    def begin(self, choice: Choice, **how: Any) -> Pending:
        """Starts its compile; `how`: as for `jaxmem.memory.begin`."""
        jaxpr = self.rewritten(choice).jaxpr

        # the same program as `Scheduled` makes, its name included: compiled once
        @functools.wraps(self.given)
        def step(*args, **kwargs):
            leaves = filter(_jaxpr.is_array, jax.tree.leaves((args, kwargs)))
            outs = _jaxpr.evaluate(jaxpr, list(leaves))
            return jax.tree.unflatten(self.out_tree, outs)

        jitted = jit_with(step, self.donated)
        how |= {"target": self.target, "compiler_options": self.compiler_options}
        return begin(jitted, self.args, self.kwargs, **how)

    def slack(self) -> float:
        """Seconds of computing again that are not worth another compile."""
        jaxpr = self.rewritten(Choice(self.target, plain=True)).jaxpr
        eqns = _jaxpr.split(jaxpr)[0].eqns
        return _ENOUGH * sum(seconds(e, MACHINES[self.target]) or 0.0 for e in eqns)


def loaded(plan: Plan, mine: str) -> Found:
    """The choice of a plan that was made for the step of this fingerprint."""
    if plan.jax_version != jax.__version__:
        raise ValueError(
            f"plan: made with jax {plan.jax_version or 'unknown'}, this is jax "
            f"{jax.__version__}, which may trace and compile the step otherwise: plan "
            "again"
        )
    if plan.fingerprint != mine:
        raise ValueError(
            f"plan: made for another step ({plan.fingerprint or 'unknown'}) than this "
            f"one ({mine}): for other operations, shapes, types, donated arguments or "
            "another clip: plan again"
        )
    return Found(plan.choice, plan.budget, fingerprint=mine)


def search(
    step: Evaluated,
    budget: int | None,
    tell: Callable[[str], None],
    named: bool = False,
    offload: bool = False,
    most: float | None = None,
) -> Found:
    """The choice that fits a budget; without one, the one that takes least.

    Without a budget nothing that costs anything is done again. `named`: only what has a
    `checkpoint_name` is kept. `offload`: what is kept may wait in the host's memory.
    After `most` seconds, or when interrupted, it is the best so far.
    """
    start = time.perf_counter()
    start_worker()
    deadline = None if most is None else time.monotonic() + most
    products = None
    while True:
        candidates = Candidates(step.begin, deadline, products)
        run = Run(step, budget, tell, candidates, named, offload)
        try:
            best = run.best()
            break
        except OtherOptions as other:  # all once more, so that all are compiled alike
            products = other.products
        finally:
            candidates.close()
    return Found(
        best.choice,
        budget,
        tuple(run.tried),
        time.perf_counter() - start,
        step.rewritten(best.choice),
        best.report,
        step.fingerprint,
        products,
        run.notes,
    )


@dataclass
class Run:
    """A search whose compiles all have the same options.

    Attributes:
      tried: what was compiled, in order.
      notes: what there is to say of how it ended.
      excess: bytes that a step took above what its assigned buffers had told.
    """

    step: Evaluated
    budget: int | None
    tell: Callable[[str], None]
    candidates: Candidates
    named: bool = False
    offload: bool = False
    tried: list[Tried] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    excess: int = 0

    @property
    def limit(self) -> float:
        """What assigned buffers may take."""
        return math.inf if self.budget is None else self.budget - self.excess

    def best(self) -> Tried:
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
            self.notes = (text,)
            return self._settled(best)

    def _too_late(self) -> str:
        tried = len(self.tried)
        least = min((t.peak for t in self.tried), default=math.inf)
        text = f"search_seconds: nothing that fits was found in {tried} compiles"
        if math.isfinite(least):
            text += f"; the least of them is {format_bytes(least)}"
        return text + ": give it more time"

    def _within(self, budget: int) -> Tried:
        """What fits once it is compiled to the end."""
        least = None
        for _ in range(_CONFIRMED):
            try:
                found, out_of_reach = self._search(self.limit), False
            except BudgetError:
                found, out_of_reach = min(self.tried, key=lambda t: t.peak), True
            best = self._settled(found)
            if best.peak <= budget:
                return best
            least = min(best, least or best, key=lambda t: t.peak)
            if out_of_reach:
                break
            self.excess = int(best.peak - found.peak)
        assert least is not None
        raise unreachable(budget, least)

    def _least(self, choices: Sequence[Choice]) -> Tried:
        """The least peak; never more than that of the step as it was given."""
        best = min(self._compiled(choices), key=lambda t: t.peak)
        best = self._settled(best)
        plain = next(t for t in self.tried if t.choice.plain)
        return min(best, self._settled(plain), key=lambda t: t.peak)

    def _settled(self, found: Tried) -> Tried:
        """With the figures of a compile to the end."""
        self.tell(f"compile to the end{saved(found)}")
        report = self.candidates.settled(found.choice)
        best = compiled(found.choice, report, found.predicted, found.seconds)
        self.tried = [best if t.choice == best.choice else t for t in self.tried]
        return best

    @functools.cached_property
    def _first(self) -> Rewritten:
        return self.step.rewritten(NAMED if self.named else NO_CHOICE)

    @functools.cached_property
    def _about(self) -> Step:
        lists = () if self.named else self._first.lists
        target = self.step.target
        return step_of(self._first.pairs, lists, target, self.named, self.offload)

    @functools.cached_property
    def _can_wait(self) -> bool:
        # names cannot say it
        waiting = Choice(self.step.target, waits=True)
        return not self.named and self.step.rewritten(waiting).waits

    def _free(self) -> list[Choice]:
        """What costs nothing; the step as it was given where nothing is asked for."""
        plain = Choice(self.step.target)
        free = [plain, *([replace(plain, order=True)] * self._about.is_list)]
        free += [replace(plain, waits=True)] * self._can_wait
        return free + [replace(plain, plain=True)] * (self.budget is None)

    def _compiled(self, choices: Sequence[Choice]) -> Iterator[Tried]:
        """These, two at a time."""
        for i, choice in enumerate(choices):
            best = best_of(self.tried, self.limit)
            self.tell(f"compile {len(self.tried) + 1}{saved(best)}")
            self.candidates.ahead(choices[i : i + 2])
            self.tried.append(compiled(choice, self.candidates(choice)))
            yield self.tried[-1]

    def _search(self, limit: float) -> Tried:
        """The fewest seconds whose assigned buffers are within a limit."""
        self.tried = []
        free = self._free() if self._about.is_list else []
        if free:
            self.candidates.ahead(free[:1])
            free = [c for c in free if not (c.order and self._order_is_vain(limit))]
        for one in self._compiled(free):
            if one.peak <= limit:
                return one
        best = min(self.tried, key=lambda t: t.peak, default=None)
        rungs = self._rungs(best)
        known = {} if best is None else {0: best.peak}
        how = self._about.layers, int(limit), self.candidates, self.tell
        more = {"slack": self.step.slack(), "ahead": self.candidates.ahead}
        about = rungs, *how, self._can_wait, self.tried, known
        return self._fitting(Search(*about, **more))

    def _fitting(self, flat: Search) -> Tried:
        """What a search finds, or another among segments where that is better.

        Better is less by the clock's estimate and no more by the count of flops.
        """
        try:
            best = flat.run()
        except BudgetError:
            rungs = in_segments(self._about, flat.rungs)
            if not rungs:
                raise
            return _among(rungs, flat).run()
        if not best.seconds:
            return best
        again = self.step.rewritten(best.choice).again
        work = sum(times * flops(e) for e, times in again)
        most = _LESS * best.seconds
        rungs = in_segments(self._about, flat.rungs)
        rungs = [r for r in rungs if r.seconds < most and r.flops <= work]
        try:
            return _among(rungs, flat).run() if rungs else best
        except BudgetError:
            return best

    def _order_is_vain(self, limit: float) -> bool:
        """Whether an order alone will not do, nor tell more than the order there is.

        Where it is far from the limit, what may be done again is looked for at once,
        while the first choice is compiled.
        """
        first = self._first.unordered
        tpu = is_tpu(self.step.target)
        graph = operations_of(first, self.step.aliases(first), tpu=tpu).graph
        there, peak = graph.bytes_of(graph.arguments), compiled_peak(graph)
        if there + peak <= _FAR * limit:
            return False
        least = self._sequences[0].bytes
        return there + least > _FAR * limit and least > (1 - _ENOUGH) * peak

    @functools.cached_property
    def _sequences(self) -> list[Rung]:
        first, target = self._first.unordered, self.step.target
        left = self.candidates.left() / 2
        if left < PATIENCE:
            return sequences(first, self.step.aliases(first), target, left)
        # time ends some of these searches: another budget gets the same sequences
        key = self.step.fingerprint, target
        found = _SEQUENCES.get(key)
        if found is None:
            found = sequences(first, self.step.aliases(first), target, PATIENCE)
            _SEQUENCES[key] = found
            for old in list(_SEQUENCES)[:-_REMEMBERED]:
                _SEQUENCES.pop(old, None)
        return found

    def _rungs(self, best: Tried | None) -> list[Rung]:
        """The choices to try; the first is the best of those that cost nothing."""
        if best is None:
            return ladder(self._about)
        rungs = self._sequences
        if len(rungs) == 1:  # the lists are in loops over micro-batches
            rungs = ladder(self._about)
        return [replace(rungs[0], choice=best.choice), *rungs[1:]]


def _among(rungs: list[Rung], flat: Search) -> Search:
    """The search over segments, after one over the ladder."""
    rest = min(peak - flat.rungs[i].bytes for i, peak in flat.peaks.items())
    return replace(flat, rungs=rungs, peaks={}, rest=rest)
