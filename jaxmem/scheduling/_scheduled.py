"""A scheduled step, which behaves like a jitted function."""

import functools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.checking import verify
from jaxmem.chips import get_target, is_gpu
from jaxmem.frameworks import Call, Jitted, jitted, map_arrays
from jaxmem.ir.host_memory import check_host_memory
from jaxmem.memory import Pending, Target, begin
from jaxmem.scheduling._arguments import jit_with, on_one_device
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._finder import Finder
from jaxmem.scheduling._options import Options
from jaxmem.scheduling._planned import planned
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling._shardings import argument_shardings
from jaxmem.scheduling._traced_calls import TracedCalls
from jaxmem.scheduling.plan.plan import Plan, undonated
from jaxmem.scheduling.search.result import SearchResult


class Scheduled:
    """A step as `schedule` returns it; behaves like a jitted function."""

    def __init__(self, step, options: Options):
        functools.update_wrapper(self, step, updated=())
        self.__wrapped__ = step
        self._options = options
        self._calls = TracedCalls(step, options)
        self._finder = Finder(self._calls)
        self._jitted: dict[Any, Any] = {}
        self._warned = options.donate is not None
        self._verified: set[Any] = set()

    def __get__(self, obj, objtype=None):
        """As a method of a class: the object comes first."""
        return self if obj is None else functools.partial(self, obj)

    def __call__(self, *args, **kwargs):
        """The step's results; its donated arguments are gone afterwards.

        Under `jax.disable_jit()` the original step runs, operation by operation.
        """
        without_jit = jax.config.jax_disable_jit  # pyright: ignore
        if self._options.verify and not without_jit:
            self._verify(args, kwargs)
        with self._calls.open(args, kwargs) as call:
            self._warn(call)
            call.check_donated(self.__wrapped__)
            if without_jit:
                with jax.disable_jit():
                    step = call.form.pure(self.__wrapped__)
                    return call.finish(step(*call.args, **call.kwargs))
            if self._options.offload and self._finder.find(call).choice.uses_host:
                check_host_memory("schedule(offload=True)")
            return call.finish(self._jit(call)(*call.args, **call.kwargs))

    def trace(self, *args, **kwargs):
        """As `jax.jit(step).trace`."""
        with self._calls.open(args, kwargs) as call:
            return self._jit(call).trace(*call.args, **call.kwargs)

    def lower(self, *args, **kwargs):
        """As `jax.jit(step).lower`; what is compiled of it takes arrays for objects."""
        with self._calls.open(args, kwargs) as call:
            return self._jit(call).lower(*call.args, **call.kwargs)

    def eval_shape(self, *args, **kwargs):
        """As `jax.jit(step).eval_shape`; no object is updated."""
        # the trace of a step updates its objects
        args, kwargs = map_arrays(lambda x: x, (args, kwargs))
        with self._calls.open(args, kwargs) as call:
            shapes = self._jit(call).eval_shape(*call.args, **call.kwargs)
            return call.finish(shapes)

    def jit_options(self, *args, **kwargs) -> Jitted:
        """Which arguments are donated and static, for who calls this step in another.

        Args:
          *args: as for the step.
          **kwargs: as for the step.
        """
        return self._own_options(args, kwargs, self._options.target)

    def _given_options(self, args: tuple, kwargs: dict[str, Any]) -> Jitted:
        own = jitted(self.__wrapped__, args, kwargs) or Jitted()
        given = self._options
        donated = own.donated if given.donate is None else given.donate
        options = given.compiler_options or own.compiler_options
        return Jitted(donated, (*given.static, *own.static), options)

    def _own_options(self, args, kwargs, target: str | Target | None) -> Jitted:
        """Those of the scheduled step, with what the compiler of a chip is told."""
        given = self._given_options(args, kwargs)
        if target is None or not is_gpu(get_target(target, check=False).name):
            return given
        with self._calls.open(args, kwargs, target) as call:
            options = self._finder.compiler_options(call, on_gpu=True)
        return replace(given, compiler_options=options)

    def plan(self, *args, target: str | Target | None = None, **kwargs) -> Plan:
        """What is released, what is not and why; nothing is run.

        Args:
          *args: as for the step; arrays or `jax.ShapeDtypeStruct`.
          target: a chip of `jaxmem.targets()` to compile both for, the original
            step and as it is scheduled; None compiles nothing.
          **kwargs: as for the step.

        Returns:
          A `Plan`.

        Raises:
          What `jaxmem.estimate` raises, where a target is given.
        """
        return planned(self._finder, args, kwargs, target, self._begun)

    def _begun(
        self, args, kwargs, target: str | Target, scheduled: bool, **how
    ) -> Pending:
        """The compile of this step, or of that which was given, with its places."""
        own = (
            self._own_options(args, kwargs, target)
            if scheduled
            else self._given_options(args, kwargs)
        )
        step = self._told(own.donated) if scheduled else self.__wrapped__
        how["advised"] = not scheduled
        how |= {"compiler_options": own.compiler_options, "target": target}
        how |= {"donate": own.donated, "static": own.static}
        return begin(step, args, kwargs, **how)

    def _told(self, donated) -> "Scheduled":
        """The same step, which no function round it tells what is donated."""
        told = Scheduled(self.__wrapped__, replace(self._options, donate=donated))
        told._finder.share(self._finder)  # what is found is not searched for twice
        return told

    def _jit(self, call: Call):
        found = self._finder.find(call)
        choice = found.choice
        # in another function those of the jit outside hold
        on_gpu = jax.default_backend() == "gpu"
        within = call.inside or _compat.is_tracing()
        options = None if within else self._finder.compiler_options(call, on_gpu)
        shardings = self._calls.shardings(call)
        told = None if options is None else tuple(sorted(options.items()))
        key = call.form, choice, told, self._calls.undecided(call), shardings
        alone = not call.inside and on_one_device((call.args, call.kwargs))
        given = argument_shardings((call.args, call.kwargs), shardings.ins)
        given = given or found.shardings
        key = *key, alone, given
        if key not in self._jitted:

            @functools.wraps(self.__wrapped__)
            def scheduled(*args, **kwargs):
                inside = replace(call, args=args, kwargs=kwargs)
                # of the arguments themselves: those of a trace are not known to it
                found, leaves, tree = self._calls.rewrite(inside, choice, given)
                if alone:
                    self._calls.check_memories(found.jaxpr, inside)
                return jax.tree.unflatten(tree, found.run(leaves))

            how = options, shardings.for_jit()
            self._jitted[key] = jit_with(scheduled, call.form.donated, *how)
        return self._jitted[key]

    def options(self) -> dict[str, Any]:
        """What `schedule` was called with beside the step, for who writes the call."""
        given = self._options
        own = {"budget": given.budget, "target": given.target, "clip": given.clip}
        own |= {"offload": given.offload, "host_budget": given.host_budget}
        own |= {"tile": given.tile}
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
        made._finder.settled = replace(found, choice=choice, rewritten=None)
        if not without:
            made._jitted = self._jitted  # what is compiled is compiled once
        return made

    def _verify(self, args, kwargs) -> None:
        """Once for each shape of the arguments: the results are those of the step."""
        with self._calls.open(args, kwargs) as call:
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
        with self._calls.open(args, kwargs) as call:
            return self._calls.rewrite(self._calls.abstract(call), choice)[0]

    def find(self, args, kwargs) -> SearchResult:
        with self._calls.open(args, kwargs) as call:
            return self._finder.find(call)

    def _warn(self, call: Call) -> None:
        """Once: nothing is donated, and nobody said so."""
        if self._warned or self._calls.undecided(call):
            return
        self._warned = True
        if not call.form.donated:
            warnings.warn(undonated(call.args), stacklevel=3)
