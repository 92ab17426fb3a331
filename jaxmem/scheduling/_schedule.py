"""`schedule`: a train step like the one given, with less alive at its peak."""

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxmem._checks import (
    check_bool,
    check_callable,
    check_choice,
    check_options,
    check_places,
    wrong_type,
)
from jaxmem._progress import spinner
from jaxmem.chips import get_target
from jaxmem.frameworks import Call, Jitted, copied_objects, jitted, pure_call
from jaxmem.ir import jaxprs
from jaxmem.ir.graph import Aliases, by_shape
from jaxmem.memory import Pending, Target, begin, format_bytes
from jaxmem.scheduling._arguments import (
    abstract,
    check_fixed_sizes,
    jit_with,
    positions,
)
from jaxmem.scheduling._choice import NO_CHOICE, Choice
from jaxmem.scheduling._once import Once
from jaxmem.scheduling._options import Options, check_seconds, room_and_target
from jaxmem.scheduling._passes import Rewritten, rewrite
from jaxmem.scheduling._shardings import (
    NO_SHARDINGS,
    Placed,
    Shardings,
    placed,
    shardings_of,
    with_results_placed,
)
from jaxmem.scheduling.plan.fingerprint import fingerprint, loaded
from jaxmem.scheduling.plan.notes import notes_of
from jaxmem.scheduling.plan.plan import Plan, make_plan, undonated
from jaxmem.scheduling.search.compiles import Compared, compared
from jaxmem.scheduling.search.result import BudgetError, SearchResult
from jaxmem.scheduling.search.search import TracedStep, search

Places = int | Sequence[int]
Names = str | Sequence[str]


def schedule(
    step: Callable,
    budget: int | str | None = None,
    *,
    target: str | Target | None = None,
    donate_argnums: Places | None = None,
    donate_argnames: Names | None = None,
    static_argnums: Places = (),
    static_argnames: Names = (),
    clip: str | None = None,
    offload: bool = False,
    plan: Plan | None = None,
    compiler_options: dict[str, Any] | None = None,
    search_seconds: float | None = None,
    progress: bool = True,
) -> "Scheduled":
    """A function transformation like `jax.jit` that makes a train step take less.

    The step is traced as it is, and its jaxpr rewritten:

    - *Gradient release.* What the optimizer does with the gradients of scanned layers
      is moved into the backward `scan`: each layer's parameters and moments are updated
      as soon as its gradient exists, in place, so that the stacked gradients never do.
      The same holds for accumulators over micro-batches, in an outer `scan`. On TPU
      the forward scan also writes each parameter that it casts back as it was read:
      one more write of the parameters a step, for which the compiler no longer makes
      narrow copies of all layers at once.
    - *Residuals.* Of what the backward scan reads of the forward one, the fewest bytes
      are kept from which the rest can be made by casts, moves and elementwise
      operations: no bf16 copy of a weight, no activation beside its input, no output
      that is the next layer's input. No matmul, reduction or random bit is done twice.
    - *A budget.* With `budget`, as much of the forward pass is recomputed as it takes
      to fit, and no more. Values are chosen by the bytes they take and the time they
      cost on `target`, and the compiler for `target` has the last word. Below one
      input for each layer, whole segments of layers are recomputed (Chen et al. 2016).
    - *Order.* Layers that are unrolled are updated right after their gradient: a
      barrier keeps the compiler from putting all updates last.

    With a target, the step is compiled as given and as rewritten, and what takes less
    is run. Without one nothing is compiled to compare: then layers are put in order
    only where the step's graph has more than half of its temporaries in gradients that
    wait, and residuals are recomputed only where they take more than the largest array
    of a layer. The plan's notes say what was left out.

    The results are those of the step, to rounding: operations are moved, not changed,
    and a sum over layers may be taken in another order.

    Args:
      step: any function that `jax.jit` takes, already jitted or not; a jitted one
        brings its own donated arguments along. It should contain the gradient and the
        update.
      budget: the peak that the compiled step may have on one device, arguments
        included, in bytes or as text like "14GiB"; by default nothing that costs
        anything is recomputed. The first call with new shapes compiles the step a
        few times to find out.
      target: the chip of `jaxmem.targets()` that the step is for: it is compiled for
        it both as given and as scheduled, and what takes less is run. By default
        nothing is compiled to compare, and a budget is for this process's first device.
      donate_argnums: positional arguments whose buffers the step may reuse: the
        parameters and the optimizer state, or nothing is updated in place and no
        gradient released. Inside another `jax.jit` or a scan, where nothing is named
        here, all arguments count as donated: name those that are, or `()`.
      donate_argnames: the same for keyword arguments.
      static_argnums: positional arguments that are Python values, not arrays.
      static_argnames: the same for keyword arguments.
      clip: "two_pass" for a step whose update needs a number made of all gradients, as
        clipping by the global norm does: a first backward pass finds the number, a
        second updates. Costs one more backward pass through the scanned layers. By
        default such a step keeps its stacked gradients, and `plan` names the operation.
      offload: with a budget, what the forward scans keep may also wait in the host's
        memory (`pinned_host`), where sending it there and back is thought to be faster
        than recomputing it, or where nothing else fits. It takes the link to the
        host, which the estimate has as 16 lanes of PCI Express.
      plan: what an earlier `plan(...)` of the same step has settled on, as
        `Plan.from_json` reads it back: nothing is compiled to find out again.
      compiler_options: as for `jax.jit`: of the step that is run, and of those that are
        compiled to find it. Inside another `jax.jit` that one's hold.
      search_seconds: after which a search takes the best that fits so far; by default
        it goes on until nothing better is likely. An interrupt (Ctrl-C) is taken as
        "that will do" as well.
      progress: show a progress bar during the search, with the best so far, where the
        output is a terminal.

    Returns:
      A `Scheduled` step: call it, give it to `jaxmem.estimate` or another `jax.jit`,
      lower it, or ask it for its `plan`.

    Raises:
      TypeError: `step` is not callable, or another argument not of its kind.
      ValueError: `clip` is another word, `budget` no size, `target` unknown,
        `search_seconds` not above 0. When the step is first called or planned: a
        budget that no choice reaches (`BudgetError`, which names the least and who
        holds it).
      TimeoutError: nothing that fits was found in `search_seconds`.
      RuntimeError: this installation cannot compile for the target.

    Example::

      step = jaxmem.schedule(step, budget="14GiB", target="h100", donate_argnums=(0,))
      print(step.plan(state, batch, target="h100"))
      state, loss = step(state, batch)

    Source: gradient release as in LOMO (Lv et al. 2023, section 3.1), on the jaxpr of
    an unmodified step.
    """
    check_callable("step", step)
    check_choice("clip", clip, (None, "two_pass"))
    check_bool("offload", offload)
    check_bool("progress", progress)
    compiler_options = check_options("compiler_options", compiler_options)
    donate = check_places(
        donate_argnums=donate_argnums, donate_argnames=donate_argnames
    )
    if donate_argnums is None and donate_argnames is None:
        donate = None
    static = check_places(
        static_argnums=static_argnums, static_argnames=static_argnames
    )
    if plan is not None and not isinstance(plan, Plan):
        raise wrong_type("plan", plan, "a Plan, of plan(...) or Plan.from_json(...)")
    if plan is not None and (budget is not None or target is not None):
        raise ValueError("plan: it has its budget and target already, give no others")
    room, name = room_and_target(budget, target)
    if offload and room is None:
        raise ValueError("offload=True: needs a budget that says how much is enough")
    check_seconds(search_seconds)
    if search_seconds is not None and name is None:
        raise ValueError(
            f"search_seconds={search_seconds!r}: without a budget or a target there is "
            "no search"
        )
    how = {"offload": offload, "compiler_options": compiler_options}
    how |= {"search_seconds": search_seconds}
    options = Options(donate, static, clip, room, name, progress, plan, **how)
    return Scheduled(step, options)


class Scheduled:
    """A step as `schedule` returns it; behaves like a jitted function."""

    def __init__(self, step, options: Options):
        functools.update_wrapper(self, step, updated=())
        self.__wrapped__ = step
        self._options = options
        self._jitted: dict[Any, Any] = {}
        self._found: Once[SearchResult] = Once(BudgetError)
        self._places: dict[Any, Shardings] = {}
        self._warned = options.donate is not None

    def __get__(self, obj, objtype=None):
        """As a method of a class: the object comes first."""
        return self if obj is None else functools.partial(self, obj)

    def __call__(self, *args, **kwargs):
        """The step's results; its donated arguments are gone afterwards."""
        with self._open(args, kwargs) as call:
            self._warn(call)
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
        args, kwargs = copied_objects((args, kwargs))
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
        with self._open(args, kwargs) as call:
            check_fixed_sizes("plan", (call.args, call.kwargs))
            found = self._find(call)
            rewritten, scheduled = found.rewritten, found.report
            if rewritten is None:
                rewritten = self._rewrite(self._abstract(call), found.choice)[0]
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
        aliases = self._aliases(rewritten.jaxpr, call)
        return make_plan(rewritten, found, both, chip, aliases, (*found.notes, *notes))

    def _begun(self, args, kwargs, target: str | Target, step, **how) -> Pending:
        """The compile of a step with the places of this one's arguments."""
        own = self.jit_options(*args, **kwargs)
        if step is self:
            step = self._told(own.donated)
        how |= {"compiler_options": own.compiler_options, "target": target}
        how |= {"donate": own.donated, "static": own.static}
        return begin(step, args, kwargs, **how)

    def _told(self, donated) -> "Scheduled":
        """The same step, which no function round it tells what is donated."""
        told = Scheduled(self.__wrapped__, replace(self._options, donate=donated))
        told._found = self._found
        return told

    def _open(self, args, kwargs) -> AbstractContextManager[Call]:
        options = self._options
        return pure_call(self.__wrapped__, args, kwargs, options.donate, options.static)

    def _jit(self, call: Call):
        choice = self._find(call).choice
        # in another function those of the jit outside hold
        options = None if call.inside else self._compiler_options(call)
        shardings = self._shardings(call)
        key = call.form, choice, options is None, self._undecided(call), shardings
        if key not in self._jitted:

            @functools.wraps(self.__wrapped__)
            def scheduled(*args, **kwargs):
                inside = replace(call, args=args, kwargs=kwargs)
                found, leaves, tree = self._rewrite(inside, choice)
                return jax.tree.unflatten(tree, jaxprs.evaluate(found.jaxpr, leaves))

            how = options, shardings.for_jit()
            self._jitted[key] = jit_with(scheduled, call.form.donated, *how)
        return self._jitted[key]

    def _compiler_options(self, call: Call) -> dict[str, Any] | None:
        if self._options.compiler_options is not None:
            return self._options.compiler_options
        return call.own.compiler_options

    def rewritten(self, choice: Choice, *args, **kwargs) -> Rewritten:
        """The step under a choice, for arguments of these shapes."""
        with self._open(args, kwargs) as call:
            return self._rewrite(self._abstract(call), choice)[0]

    def find(self, args, kwargs) -> SearchResult:
        """The choice for arguments of these shapes."""
        with self._open(args, kwargs) as call:
            return self._find(call)

    def _rewrite(self, call: Call, choice: Choice) -> tuple[Rewritten, list, Any]:
        traced = self._trace(call)
        found = self._rewritten(traced, call, choice)
        return found, traced.leaves, traced.out_tree

    def _trace(self, call: Call) -> Placed:
        step = call.form.pure(self.__wrapped__)
        traced = jaxprs.trace(step, *call.args, **call.kwargs)
        if call.own.placed:
            return placed(traced)
        return Placed(traced.jaxpr, traced.leaves, traced.out_tree)

    def _shardings(self, call: Call) -> Shardings:
        """Those that a jitted step names."""
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
        """The call with shapes and dtypes for arrays."""
        arguments = abstract((call.args, call.kwargs))
        args, kwargs = self._shardings(call).of(arguments)
        return replace(call, args=args, kwargs=kwargs)

    def _rewritten(self, traced: Placed, call: Call, choice: Choice) -> Rewritten:
        aliases = self._aliases(traced.jaxpr, call)
        found = rewrite(traced.jaxpr, aliases, self._options.clip, choice)
        return replace(found, jaxpr=with_results_placed(found.jaxpr, traced.outs))

    def _aliases(self, closed, call: Call) -> Aliases:
        given = positions(call.args, call.kwargs, call.form.donated)
        if self._undecided(call):
            given = range(len(closed.in_avals))
        return by_shape(closed, given)

    def _undecided(self, call: Call) -> bool:
        """Whether a function round the step says what is donated."""
        return call.inside and self._options.donate is None and not call.form.donated

    def _find(self, call: Call) -> SearchResult:
        if self._options.target is None and self._options.plan is None:
            return SearchResult(NO_CHOICE)
        return self._found.get(call.signature, partial(self._look, call))

    def _look(self, call: Call) -> SearchResult:
        """The choice of a plan, or else that of a search."""
        budget, target = self._options.budget, self._options.target
        call = self._abstract(call)
        traced = self._trace(call)
        given = positions(call.args, call.kwargs, call.form.donated)
        mark = fingerprint(traced.jaxpr, given, self._options.clip)
        if self._options.plan is not None:
            return loaded(self._options.plan, mark)
        assert target is not None
        step = TracedStep(
            functools.cache(partial(self._rewritten, traced, call)),  # of the choice
            partial(self._aliases, call=call),
            traced.out_tree,
            self.__wrapped__,
            call.form.donated,
            call.args,
            call.kwargs,
            target,
            mark,
            self._compiler_options(call),
        )
        name = getattr(self.__wrapped__, "__name__", "the step")
        title = f"scheduling {name} for {target}"
        if budget is not None:
            title += f" in {format_bytes(budget)}"
        with spinner(self._options.progress, title) as tell:
            how = self._options.named, self._options.offload
            return search(step, budget, tell, *how, self._options.search_seconds)

    def _warn(self, call: Call) -> None:
        """Once: nothing is donated, and nobody said so."""
        if self._warned or self._undecided(call):
            return
        self._warned = True
        if not call.form.donated:
            warnings.warn(undonated(call.args), stacklevel=3)
