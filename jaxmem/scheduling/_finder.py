"""The choice for a call: searched for once, or known from elsewhere."""

import functools
from dataclasses import replace
from functools import partial
from typing import Any

from jaxmem._compat import no_leak_check
from jaxmem._garbage import seldom_collected
from jaxmem._progress import spinner
from jaxmem.chips import is_gpu
from jaxmem.frameworks import Call, canonical
from jaxmem.ir.auto_axes import on_auto_axes
from jaxmem.memory import format_bytes
from jaxmem.scheduling._arguments import positions
from jaxmem.scheduling._choice import NO_CHOICE
from jaxmem.scheduling._compiler_options import with_defaults
from jaxmem.scheduling._once import Once
from jaxmem.scheduling._remembered import Remembered
from jaxmem.scheduling._shardings import Placed, argument_shardings, mesh_of, unplaced
from jaxmem.scheduling._traced_calls import TracedCalls
from jaxmem.scheduling.plan.fingerprint import fingerprint, loaded
from jaxmem.scheduling.search.in_job import described, first_process, in_job
from jaxmem.scheduling.search.on_disk import on_disk
from jaxmem.scheduling.search.outcome import outcome_of, search_key
from jaxmem.scheduling.search.result import BudgetError, SearchResult
from jaxmem.scheduling.search.search import search
from jaxmem.scheduling.search.traced_step import TracedStep


class Finder:
    """Finds a choice for each kind of call."""

    def __init__(self, calls: TracedCalls):
        self.calls = calls
        self.settled: SearchResult | None = None  # of all calls
        self._found: Once[SearchResult] = Once(BudgetError)
        # of steps on several devices, by fingerprint: what a trace cannot see of them
        self._sharded: dict[str, SearchResult] = {}
        self._options: Once[tuple[dict[str, Any] | None]] = Once(BudgetError)

    def share(self, other: "Finder") -> None:
        """Takes part in what another one finds."""
        self._found, self._sharded = other._found, other._sharded
        self._options = other._options

    def find(self, call: Call) -> SearchResult:
        if self.settled is not None:
            return self.settled
        if self.calls.options.target is None and self.calls.options.plan is None:
            return SearchResult(NO_CHOICE)
        return self._found.get(call.signature, partial(self._look, call))

    def compiler_options(
        self, call: Call, on_gpu: bool, traced: Placed | None = None
    ) -> dict[str, Any] | None:
        """Those that the user names, and what XLA is told besides.

        `traced`: the call's trace, where there is one already.
        """
        given = self.calls.compiler_options(call)
        if not on_gpu:
            return given

        def found() -> tuple[dict[str, Any] | None]:
            known = traced or self.calls.trace(self.calls.abstract(call))
            return (with_defaults(given, known.jaxpr),)

        return self._options.get(call.signature, found)[0]

    @seldom_collected()
    def _look(self, call: Call) -> SearchResult:
        target, asked = self.calls.options.target, call
        call = self.calls.abstract(call)
        traced = self.calls.trace(call)
        mark = self.mark(call, traced)
        if self.calls.options.plan is not None:
            # in another `jit` nobody knows where arguments are
            mesh = None if call.inside else mesh_of(self.calls.given(call))
            return loaded(self.calls.options.plan, mark, mesh)
        # In another `jit` nobody knows where arguments are: then as they were before.
        if call.inside and mark in self._sharded:
            return self._sharded[mark]
        assert target is not None
        known = Remembered()
        step = TracedStep(
            functools.cache(partial(self.calls.rewritten, traced, call, known)),
            partial(self.calls.aliases, call=call),
            traced.out_tree,
            self.calls.step,
            call.form.donated,
            call.args,
            call.kwargs,
            target,
            mark,
            self.compiler_options(asked, is_gpu(target), traced),
            known,
            self.calls.input_shardings(traced.jaxpr, call),
        )
        places = argument_shardings((call.args, call.kwargs), traced.ins), traced.outs
        # under a check of leaks nothing of a search would be remembered
        with no_leak_check(), on_auto_axes():
            found = self._looked_up(step, fingerprint(traced.jaxpr), *places)
        if any(places[0]):
            found = self._sharded[mark] = replace(found, shardings=places[0])
        return found

    def mark(self, call: Call, traced: Placed) -> str:
        """The fingerprint of the step, wherever its arguments are."""
        given = positions(call.args, call.kwargs, call.form.donated)
        if argument_shardings((call.args, call.kwargs)):
            args, kwargs = unplaced((call.args, call.kwargs))
            traced = self.calls.trace(replace(call, args=args, kwargs=kwargs))
        return fingerprint(traced.jaxpr, given, self.calls.options.clip)

    def _looked_up(self, step: TracedStep, traced: str, ins, outs) -> SearchResult:
        """What is on disk, what another process of this job has found, or a search."""
        given, rewritten = self.calls.options, step.rewritten
        asked = given.target, given.budget, given.named, given.host, given.tile
        asked = *asked, given.audit, given.quick
        places = [tuple(map(canonical, where)) for where in (ins, outs)]
        mark = step.fingerprint, traced, *places, step.donated
        key = search_key(*mark, *asked, sorted((step.compiler_options or {}).items()))
        search = partial(outcome_of, partial(self._search, step))
        if given.cache:
            search = partial(on_disk, key, rewritten, search, given.search_seconds)
        first = first_process(ins)
        if first is not None:
            about = described((step.args, step.kwargs), ins)
            return in_job(key, self._name, about, rewritten, search, first).get()
        return search().get()

    def _search(self, step: TracedStep) -> SearchResult:
        given = self.calls.options
        title = f"scheduling {self._name} for {given.target}"
        if given.budget is not None:
            title += f" in {format_bytes(given.budget)}"
        with spinner(given.progress, title) as tell:
            how = given.named, given.host, given.search_seconds, given.tile
            how = *how, given.audit, given.quick
            try:
                return search(step, given.budget, tell, *how)
            finally:
                step.known.forget()  # the result holds lists of equations that hold it

    @property
    def _name(self) -> str:
        return getattr(self.calls.step, "__name__", "the step")
