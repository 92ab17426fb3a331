"""A scheduled step, which behaves like a jitted function."""

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxmem._compat import no_leak_check
from jaxmem._progress import spinner
from jaxmem.checking import verify
from jaxmem.chips import get_target, traced_for
from jaxmem.faults import WHAT_IS_DONE, devices_of, has_sums_apart, with_sums_apart
from jaxmem.frameworks import Call, Jitted, jitted, map_arrays, pure_call
from jaxmem.ir import jaxprs
from jaxmem.ir.graph import Aliases, by_shape
from jaxmem.ir.host_memory import check_host_memory
from jaxmem.ir.host_slices import with_hidden_indices
from jaxmem.ir.shard_maps import whole_step
from jaxmem.ir.shards import InputSpreads, of_shardings
from jaxmem.memory import Pending, Target, begin, format_bytes
from jaxmem.scheduling._arguments import (
    abstract,
    check_fixed_sizes,
    check_memories,
    jit_with,
    on_one_device,
    positions,
)
from jaxmem.scheduling._choice import NO_CHOICE, Choice
from jaxmem.scheduling._once import Once
from jaxmem.scheduling._options import Options
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling._remembered import Remembered
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling._shardings import (
    NO_SHARDINGS,
    Placed,
    Shardings,
    argument_shardings,
    mesh_of,
    placed,
    shardings_of,
    unplaced,
    with_results_placed,
)
from jaxmem.scheduling.plan.fingerprint import fingerprint, loaded
from jaxmem.scheduling.plan.notes import notes_of
from jaxmem.scheduling.plan.plan import Plan, make_plan, undonated
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.search.compiles import Compared, compared
from jaxmem.scheduling.search.in_job import described, first_process, in_job
from jaxmem.scheduling.search.on_disk import on_disk
from jaxmem.scheduling.search.outcome import outcome_of, search_key
from jaxmem.scheduling.search.result import BudgetError, SearchResult
from jaxmem.scheduling.search.search import search
from jaxmem.scheduling.search.traced_step import TracedStep


class Scheduled:
    """A step as `schedule` returns it; behaves like a jitted function."""

    def __init__(self, step, options: Options):
        functools.update_wrapper(self, step, updated=())
        self.__wrapped__ = step
        self._options = options
        self._jitted: dict[Any, Any] = {}
        self._found: Once[SearchResult] = Once(BudgetError)
        # of steps on several devices, by fingerprint: what a trace cannot see of them
        self._sharded: dict[str, SearchResult] = {}
        self._places: dict[Any, Shardings] = {}
        self._warned = options.donate is not None
        self._settled: SearchResult | None = None
        self._verified: set[Any] = set()

    def __get__(self, obj, objtype=None):
        """As a method of a class: the object comes first."""
        return self if obj is None else functools.partial(self, obj)

    def __call__(self, *args, **kwargs):
        """The step's results; its donated arguments are gone afterwards.

        Under `jax.disable_jit()` the step as it was given runs, operation by operation.
        """
        without_jit = jax.config.jax_disable_jit  # pyright: ignore
        if self._options.verify and not without_jit:
            self._verify(args, kwargs)
        with self._open(args, kwargs) as call:
            self._warn(call)
            call.check_donated(self.__wrapped__)
            if without_jit:
                with jax.disable_jit():
                    step = call.form.pure(self.__wrapped__)
                    return call.finish(step(*call.args, **call.kwargs))
            if self._options.offload and self._sends_away(call):
                check_host_memory("schedule(offload=True)")
            return call.finish(self._jit(call)(*call.args, **call.kwargs))

    def trace(self, *args, **kwargs):
        """As `jax.jit(step).trace`."""
        with self._open(args, kwargs) as call:
            return self._jit(call).trace(*call.args, **call.kwargs)

    def lower(self, *args, **kwargs):
        """As `jax.jit(step).lower`; what is compiled of it takes arrays for objects."""
        with self._open(args, kwargs) as call:
            return self._jit(call).lower(*call.args, **call.kwargs)

    def eval_shape(self, *args, **kwargs):
        """As `jax.jit(step).eval_shape`; no object is updated."""
        # the trace of a step updates its objects
        args, kwargs = map_arrays(lambda x: x, (args, kwargs))
        with self._open(args, kwargs) as call:
            shapes = self._jit(call).eval_shape(*call.args, **call.kwargs)
            return call.finish(shapes)

    def jit_options(self, *args, **kwargs) -> Jitted:
        """Which arguments are donated and static, for who calls this step in another.

        Args:
          *args: as for the step.
          **kwargs: as for the step.
        """
        own = jitted(self.__wrapped__, args, kwargs) or Jitted()
        given = self._options
        donated = own.donated if given.donate is None else given.donate
        options = given.compiler_options or own.compiler_options
        return Jitted(donated, (*given.static, *own.static), options)

    def plan(self, *args, target: str | Target | None = None, **kwargs) -> Plan:
        """What is released, what is not and why; nothing is run.

        Args:
          *args: as for the step; arrays or `jax.ShapeDtypeStruct`.
          target: a chip of `jaxmem.targets()` to compile both for, the step as it was
            given and as it is scheduled; None compiles nothing.
          **kwargs: as for the step.

        Returns:
          A `Plan`.

        Raises:
          What `jaxmem.estimate` raises, where a target is given.
        """
        with self._open(args, kwargs, target) as call:
            check_fixed_sizes("plan", (call.args, call.kwargs))
            call.check_donated(self.__wrapped__)
            found = self._find(call)
            if not found.fingerprint:  # there was no search
                own = self._abstract(call)
                mark = self._mark(own, self._trace(own))
                found = replace(found, fingerprint=mark)
            rewritten, scheduled = found.rewritten, found.report
            if rewritten is None:
                rewritten = self._rewrite(self._abstract(call), found.choice)[0]
            if not call.inside and on_one_device((call.args, call.kwargs)):
                self._check_memories(rewritten.jaxpr, call)
            if call.form.as_it_is:  # where a jitted step says its arguments are
                places = self._shardings(call)
                args, kwargs = places.of(abstract((args, kwargs)))
        both, chip = Compared(None, None), ""
        target = self._options.target if target is None else target
        if target is not None:
            chip = get_target(target).name
            begun = partial(self._begun, args, kwargs, target)
            same = scheduled is not None and chip == scheduled.target
            plain, own = partial(begun, self.__wrapped__), partial(begun, self)
            known, products = (scheduled, found.products) if same else (None, None)
            both = compared(plain, own, known, products)
        notes = [] if call.form.donated else [undonated(call.args)]
        notes += notes_of(rewritten, found.choice.unchanged)
        notes += self._unknown_shards(rewritten.jaxpr, call)
        spread = call.inside or devices_of(self._given(call)) > 1
        if has_sums_apart(rewritten.written_out, spread):
            notes.append(WHAT_IS_DONE)
        aliases = self._aliases(rewritten.jaxpr, call)
        notes = (*found.notes, *notes)
        spreads = self._spreads(rewritten.jaxpr, call)
        mesh = mesh_of(self._given(call))
        return make_plan(rewritten, found, both, chip, aliases, notes, spreads, mesh)

    def _begun(self, args, kwargs, target: str | Target, step, **how) -> Pending:
        """The compile of a step with the places of this one's arguments."""
        own = self.jit_options(*args, **kwargs)
        how["advised"] = step is not self
        if step is self:
            step = self._told(own.donated)
        how |= {"compiler_options": own.compiler_options, "target": target}
        how |= {"donate": own.donated, "static": own.static}
        return begin(step, args, kwargs, **how)

    def _told(self, donated) -> "Scheduled":
        """The same step, which no function round it tells what is donated."""
        told = Scheduled(self.__wrapped__, replace(self._options, donate=donated))
        # what has been found is not searched for twice
        told._found, told._sharded = self._found, self._sharded
        return told

    @contextmanager
    def _open(self, args, kwargs, target=None) -> Iterator[Call]:
        given = self._options
        target = given.target if target is None else target
        chip = None if target is None else get_target(target)
        own = self.__wrapped__, args, kwargs, given.donate, given.static
        with traced_for(chip), pure_call(*own) as call:
            yield call

    def _jit(self, call: Call):
        found = self._find(call)
        choice = found.choice
        # in another function those of the jit outside hold
        options = None if call.inside else self._compiler_options(call)
        shardings = self._shardings(call)
        key = call.form, choice, options is None, self._undecided(call), shardings
        alone = not call.inside and on_one_device((call.args, call.kwargs))
        given = argument_shardings((call.args, call.kwargs), shardings.ins)
        given = given or found.shardings
        key = *key, alone, given
        if key not in self._jitted:

            @functools.wraps(self.__wrapped__)
            def scheduled(*args, **kwargs):
                inside = replace(call, args=args, kwargs=kwargs)
                # of the arguments themselves: those of a trace are not known to it
                found, leaves, tree = self._rewrite(inside, choice, given)
                if alone:
                    self._check_memories(found.jaxpr, inside)
                return jax.tree.unflatten(tree, jaxprs.evaluate(found.jaxpr, leaves))

            how = options, shardings.for_jit()
            self._jitted[key] = jit_with(scheduled, call.form.donated, *how)
        return self._jitted[key]

    def _compiler_options(self, call: Call) -> dict[str, Any] | None:
        if self._options.compiler_options is not None:
            return self._options.compiler_options
        return call.own.compiler_options

    def options(self) -> dict[str, Any]:
        """What `schedule` was called with beside the step, for who writes the call."""
        given = self._options
        own = {"budget": given.budget, "target": given.target, "clip": given.clip}
        own |= {"offload": given.offload, "tile": given.tile}
        for kind, places in (("donate", given.donate), ("static", given.static)):
            if places is not None:
                numbers = tuple(p for p in places if isinstance(p, int))
                names = tuple(p for p in places if isinstance(p, str))
                own |= {f"{kind}_argnums": numbers, f"{kind}_argnames": names}
        return {k: v for k, v in own.items() if v is not None}

    def applied_passes(self, *args, **kwargs) -> tuple[str, ...]:
        """Names of the passes that change the step, in their order.

        Args:
          *args: as for the step.
          **kwargs: as for the step.
        """
        choice = self.find(args, kwargs).choice
        return self.rewritten(choice, *args, **kwargs).applied

    def settled(self, *args, without: Sequence[str] = (), **kwargs) -> "Scheduled":
        """The same step with the choice that is found for these arguments.

        It is not searched for again, whatever the step is called with.

        Args:
          *args: as for the step.
          without: names of passes to switch off.
          **kwargs: as for the step.
        """
        found = self.find(args, kwargs)
        choice = replace(found.choice, without=tuple(without))
        made = Scheduled(self.__wrapped__, replace(self._options, verify=False))
        made._warned = True
        made._settled = replace(found, choice=choice, rewritten=None)
        if not without:
            made._jitted = self._jitted  # what is compiled is compiled once
        return made

    def _verify(self, args, kwargs) -> None:
        """Once for each shape of the arguments: the results are those of the step."""
        with self._open(args, kwargs) as call:
            known = call.inside or call.signature in self._verified
            mark = call.signature
        if not known:
            verify(
                self.settled(*args, **kwargs),
                self.__wrapped__,
                args,
                kwargs,
                self._options.static,
            )
            self._verified.add(mark)

    def rewritten(self, choice: Choice, *args, **kwargs) -> Rewritten:
        with self._open(args, kwargs) as call:
            return self._rewrite(self._abstract(call), choice)[0]

    def find(self, args, kwargs) -> SearchResult:
        with self._open(args, kwargs) as call:
            return self._find(call)

    def _rewrite(
        self, call: Call, choice: Choice, given: tuple[Any, ...] | None = None
    ) -> tuple[Rewritten, list, Any]:
        traced = self._trace(call)
        found = self._rewritten(traced, call, None, choice, given=given)
        return found, traced.leaves, traced.out_tree

    def _trace(self, call: Call) -> Placed:
        step = call.form.pure(self.__wrapped__)
        traced = jaxprs.trace(step, *call.args, **call.kwargs)
        if call.own.placed:
            return placed(traced)
        return Placed(traced.jaxpr, traced.leaves, traced.out_tree)

    def _shardings(self, call: Call) -> Shardings:
        if not call.own.placed:
            return NO_SHARDINGS
        if call.signature not in self._places:
            arguments = abstract((call.args, call.kwargs))
            step = call.form.pure(self.__wrapped__)
            traced = jaxprs.trace(step, *arguments[0], **arguments[1])
            tree = jax.tree.structure(arguments)
            self._places[call.signature] = shardings_of(traced, tree)
        return self._places[call.signature]

    def _abstract(self, call: Call) -> Call:
        arguments = abstract((call.args, call.kwargs))
        args, kwargs = self._shardings(call).of(arguments)
        return replace(call, args=args, kwargs=kwargs)

    def _rewritten(
        self,
        traced: Placed,
        call: Call,
        known: Remembered | None,
        choice: Choice,
        ordered: bool = True,
        given: tuple[Any, ...] | None = None,
    ) -> Rewritten:
        aliases = self._aliases(traced.jaxpr, call)
        if given is None:
            given = argument_shardings((call.args, call.kwargs), traced.ins)
        how = self._options.clip, choice, given, known, ordered
        found = rewrite(traced.jaxpr, aliases, *how)
        if not ordered:
            return found
        closed = with_results_placed(found.jaxpr, traced.outs)
        # in another function nobody knows where arguments are
        spread = call.inside or devices_of(given) > 1
        closed = with_sums_apart(with_hidden_indices(closed), spread)
        return replace(found, jaxpr=closed)

    def _given(self, call: Call) -> tuple[Any, ...]:
        """The shardings of the arguments."""
        named = self._shardings(call).ins
        return argument_shardings((call.args, call.kwargs), named)

    def _spreads(self, closed, call: Call) -> InputSpreads | None:
        """How the inputs of the step are spread over devices."""
        return of_shardings(closed, self._given(call))

    def _unknown_shards(self, closed, call: Call) -> list[str]:
        """A sentence where arguments are spread in a way that is not known."""
        if not self._given(call) or self._spreads(closed, call) is not None:
            return []
        if whole_step(closed) is not None:  # its shapes are those of one device
            return []
        return [
            "its arguments are spread over several meshes, or over axes that are "
            "explicit: how the arrays in between are is not known, and bytes that no "
            "compiler has told are those of whole arrays"
        ]

    def _aliases(self, closed, call: Call) -> Aliases:
        given = positions(call.args, call.kwargs, call.form.donated)
        if self._undecided(call):
            given = range(len(closed.in_avals))
        return by_shape(closed, given)

    def _check_memories(self, closed, call: Call) -> None:
        given = positions(call.args, call.kwargs, call.form.donated)
        check_memories(closed, given, (call.args, call.kwargs))

    def _sends_away(self, call: Call) -> bool:
        return self._find(call).choice.get(Recompute).offload is not None

    def _undecided(self, call: Call) -> bool:
        """Whether a function round the step says what is donated."""
        return call.inside and self._options.donate is None and not call.form.donated

    def _find(self, call: Call) -> SearchResult:
        if self._settled is not None:
            return self._settled
        if self._options.target is None and self._options.plan is None:
            return SearchResult(NO_CHOICE)
        return self._found.get(call.signature, partial(self._look, call))

    def _look(self, call: Call) -> SearchResult:
        target = self._options.target
        call = self._abstract(call)
        traced = self._trace(call)
        mark = self._mark(call, traced)
        if self._options.plan is not None:
            # in another `jit` nobody knows where arguments are
            mesh = None if call.inside else mesh_of(self._given(call))
            return loaded(self._options.plan, mark, mesh)
        # In another `jit` nobody knows where arguments are: then as they were before.
        if call.inside and mark in self._sharded:
            return self._sharded[mark]
        assert target is not None
        known = Remembered()
        step = TracedStep(
            functools.cache(partial(self._rewritten, traced, call, known)),
            partial(self._aliases, call=call),
            traced.out_tree,
            self.__wrapped__,
            call.form.donated,
            call.args,
            call.kwargs,
            target,
            mark,
            self._compiler_options(call),
            known,
            self._spreads(traced.jaxpr, call),
        )
        places = argument_shardings((call.args, call.kwargs), traced.ins), traced.outs
        with no_leak_check():  # under which nothing of a search would be remembered
            found = self._looked_up(step, fingerprint(traced.jaxpr), *places)
        if any(places[0]):
            found = self._sharded[mark] = replace(found, shardings=places[0])
        return found

    def _mark(self, call: Call, traced: Placed) -> str:
        """The fingerprint of the step, wherever its arguments are."""
        given = positions(call.args, call.kwargs, call.form.donated)
        if argument_shardings((call.args, call.kwargs)):
            args, kwargs = unplaced((call.args, call.kwargs))
            traced = self._trace(replace(call, args=args, kwargs=kwargs))
        return fingerprint(traced.jaxpr, given, self._options.clip)

    def _looked_up(self, step: TracedStep, traced: str, ins, outs) -> SearchResult:
        """What is on disk, what another process of this job has found, or a search."""
        given, rewritten = self._options, step.rewritten
        asked = given.target, given.budget, given.named, given.offload, given.tile
        asked = *asked, given.audit
        mark = step.fingerprint, traced, ins, outs, step.donated
        key = search_key(*mark, *asked, sorted((step.compiler_options or {}).items()))
        search = partial(outcome_of, partial(self._search, step))
        if given.cache:
            search = partial(on_disk, key, rewritten, search, given.search_seconds)
        first = first_process(ins)
        if first is not None:
            about = described((step.args, step.kwargs), ins)
            return in_job(key, self._name, about, rewritten, search, first).get()
        return search().get()

    @property
    def _name(self) -> str:
        return getattr(self.__wrapped__, "__name__", "the step")

    def _search(self, step: TracedStep) -> SearchResult:
        given = self._options
        title = f"scheduling {self._name} for {given.target}"
        if given.budget is not None:
            title += f" in {format_bytes(given.budget)}"
        with spinner(given.progress, title) as tell:
            how = given.named, given.offload, given.search_seconds, given.tile
            how = *how, given.audit
            try:
                return search(step, given.budget, tell, *how)
            finally:
                step.known.forget()  # the result holds lists of equations that hold it

    def _warn(self, call: Call) -> None:
        """Once: nothing is donated, and nobody said so."""
        if self._warned or self._undecided(call):
            return
        self._warned = True
        if not call.form.donated:
            warnings.warn(undonated(call.args), stacklevel=3)
