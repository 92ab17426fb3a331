"""A traced step, compiled under several choices until one of them will do."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxmem import _jaxpr
from jaxmem.frameworks import Place
from jaxmem.memory import MemoryReport, estimate
from jaxmem.memory._pool import DoesNotFit
from jaxmem.scheduling._arguments import jit_with
from jaxmem.scheduling._budget import BudgetError, Search, Tried, compiled
from jaxmem.scheduling._choice import NAMED, NO_CHOICE, Choice
from jaxmem.scheduling._ladder import Rung, Step, ladder, step_of
from jaxmem.scheduling._ladder_segments import in_segments
from jaxmem.scheduling._machine import flops
from jaxmem.scheduling._passes import Aliases, Rewritten
from jaxmem.scheduling._plan import Plan
from jaxmem.scheduling._reordered import sequences


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


@dataclass(frozen=True)
class Evaluated:
    """A step traced once, to be compiled under several choices."""

    rewritten: Callable[[Choice], Rewritten]
    aliases: Callable[[Any], Aliases]
    out_tree: Any
    donated: tuple[Place, ...]
    args: tuple
    kwargs: dict[str, Any]
    target: str
    fingerprint: str
    compiler_options: dict[str, Any] | None = None

    def compile(self, choice: Choice) -> MemoryReport | None:
        """The compiler's report; None if it finds no way to fit the chip."""
        jaxpr = self.rewritten(choice).jaxpr

        def step(*args, **kwargs):
            leaves = filter(_jaxpr.is_array, jax.tree.leaves((args, kwargs)))
            outs = _jaxpr.evaluate(jaxpr, list(leaves))
            return jax.tree.unflatten(self.out_tree, outs)

        jitted = jit_with(step, self.donated)
        how = {"target": self.target, "compiler_options": self.compiler_options}
        try:
            return estimate(jitted, *self.args, **how, **self.kwargs)
        except DoesNotFit:
            return None


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
) -> Found:
    """The choice that fits a budget; without one, the one that takes least.

    Without a budget nothing that costs anything is done again. `named`: only what has a
    `checkpoint_name` is kept. `offload`: what is kept may wait in the host's memory.
    """
    start = time.perf_counter()
    first = step.rewritten(NAMED if named else NO_CHOICE)
    lists = () if named else first.lists
    about = step_of(first.pairs, lists, step.target, named, offload)
    waiting = Choice(step.target, waits=True)
    can_wait = not named and step.rewritten(waiting).waits  # names cannot say it
    free = [Choice(step.target), *([Choice(step.target, order=True)] * about.is_list)]
    free += [waiting] * can_wait
    if budget is None:
        free.append(Choice(step.target, plain=True))
    tried = []
    for choice in free if budget is None or about.is_list else ():
        tell(f"compile {len(tried) + 1}")
        tried.append(compiled(choice, step.compile(choice)))
    best = min(tried, key=lambda t: t.peak, default=None)
    if budget is not None and (best is None or best.peak > budget):
        rungs = _rungs(step, first, about, best)
        known = {} if best is None else {0: best.peak}
        how = about.layers, budget, step.compile, tell, can_wait
        choose = Search(rungs, *how, tried, known)
        best = _fitting(step, choose, about)
    assert best is not None
    seconds = time.perf_counter() - start
    rewritten = step.rewritten(best.choice)
    return Found(
        best.choice,
        budget,
        tuple(tried),
        seconds,
        rewritten,
        best.report,
        step.fingerprint,
    )


_LESS = 0.95  # of the seconds: for more, segments are not looked at


def _fitting(step: Evaluated, flat: Search, about: Step) -> Tried:
    """What a search finds, or another among segments where that is better.

    Better is less by the clock's estimate and no more by the count of flops.
    """
    try:
        best = flat.run()
    except BudgetError:
        rungs = in_segments(about, flat.rungs)
        if not rungs:
            raise
        return _among(rungs, flat).run()
    if not best.seconds:
        return best
    work = sum(times * flops(e) for e, times in step.rewritten(best.choice).again)
    most = _LESS * best.seconds
    rungs = in_segments(about, flat.rungs)
    rungs = [r for r in rungs if r.seconds < most and r.flops <= work]
    try:
        return _among(rungs, flat).run() if rungs else best
    except BudgetError:
        return best


def _among(rungs: list[Rung], flat: Search) -> Search:
    """The search over segments, after one over the ladder."""
    rest = min(peak - flat.rungs[i].bytes for i, peak in flat.peaks.items())
    return replace(flat, rungs=rungs, peaks={}, rest=rest)


def _rungs(step: Evaluated, first: Rewritten, about: Step, best: Tried | None):
    """The choices to try; the first is the best of those that do nothing again."""
    if best is None:
        return ladder(about)
    aliases = step.aliases(first.unordered)
    rungs = sequences(first.unordered, aliases, step.target)
    if len(rungs) == 1:  # the lists are in loops over micro-batches
        rungs = ladder(about)
    return [replace(rungs[0], choice=best.choice), *rungs[1:]]
