"""`schedule`: a train step like the one given, with less alive at its peak."""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.core import Tracer

from jaxmem import _jaxpr
from jaxmem.memory import Target, estimate, format_bytes, parse_bytes
from jaxmem.memory._jitted import own_arguments
from jaxmem.memory._spinner import spinner
from jaxmem.memory._targets import get_target, local_target
from jaxmem.scheduling._arguments import abstract, jit_with, kind, positions
from jaxmem.scheduling._choice import NO_CHOICE, Choice
from jaxmem.scheduling._passes import Aliases, Rewritten, by_shape, rewrite
from jaxmem.scheduling._plan import Plan, fingerprint, make_plan, undonated
from jaxmem.scheduling._search import Evaluated, Found, loaded, search

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
    - *A budget.* With `budget`, as much of the forward pass is computed again as it
      takes to fit, and no more: which values is chosen by the bytes they take and the
      time they cost on `target`, and the compiler for `target` has the last word. Below
      one input for each layer, segments of layers are run again (Chen et al. 2016).
    - *Order.* Layers that are unrolled are updated right after their gradient: a
      barrier keeps the compiler from putting all updates last.

    The results are those of the step, to rounding: operations are moved, not changed,
    and a sum over layers may be taken in another order.

    Args:
      step: any function that `jax.jit` takes, already jitted or not; a jitted one
        brings its own donated arguments along. It should contain the gradient and the
        update.
      budget: the peak that the compiled step may have on one device, arguments
        included, in bytes or as text like "14GiB"; by default nothing that costs
        anything is computed again. The first call with new shapes compiles the step a
        few times to find out.
      target: the chip of `jaxmem.targets()` that the step is for: it is compiled for
        it both as given and as scheduled, and what takes less is run. By default
        nothing is compiled to compare, and a budget is for this process's first device.
      donate_argnums: positional arguments whose buffers the step may reuse: the
        parameters and the optimizer state, or nothing is updated in place.
      donate_argnames: the same for keyword arguments.
      static_argnums: positional arguments that are Python values, not arrays.
      static_argnames: the same for keyword arguments.
      clip: "two_pass" for a step whose update needs a number made of all gradients, as
        clipping by the global norm does: a first backward pass finds the number, a
        second updates. Costs one more backward pass through the scanned layers. By
        default such a step keeps its stacked gradients, and `plan` names the operation.
      offload: with a budget, what the forward scans keep may also wait in the host's
        memory (`pinned_host`), where sending it there and back is thought to be faster
        than computing it again, or where nothing else fits. It takes the link to the
        host, which the estimate has as 16 lanes of PCI Express.
      plan: what an earlier `plan(...)` of the same step has settled on, as
        `Plan.from_json` reads it back: nothing is compiled to find out again.
      compiler_options: as for `jax.jit`: of the step that is run, and of those that are
        compiled to find it. Inside another `jax.jit` that one's hold.
      progress: show a progress bar during the search, where the output is a terminal.

    Returns:
      A `Scheduled` step: call it, give it to `jaxmem.estimate` or another `jax.jit`,
      lower it, or ask it for its `plan`.

    Raises:
      TypeError: `step` is not callable.
      ValueError: `clip` is another word, `budget` no size, `target` unknown. When the
        step is first called or planned: a budget that no choice reaches
        (`BudgetError`, which names the least and who holds it).
      RuntimeError: this installation cannot compile for the target.

    Example::

      step = jaxmem.schedule(step, budget="14GiB", target="h100", donate_argnums=(0,))
      print(step.plan(state, batch, target="h100"))
      state, loss = step(state, batch)

    Source: gradient release as in LOMO (Lv et al. 2023, section 3.1), on the jaxpr of
    an unmodified step.
    """
    if not callable(step):
        raise TypeError(f"step must be a function, got {type(step).__name__}: {step!r}")
    if clip not in (None, "two_pass"):
        raise ValueError(f"clip={clip!r}: allowed are None and 'two_pass'")
    donate = None
    if donate_argnums is not None or donate_argnames is not None:
        donate = (*_many(donate_argnums), *_many(donate_argnames))
    static = (*_many(static_argnums), *_many(static_argnames))
    if plan is not None and (budget is not None or target is not None):
        raise ValueError("plan: it has its budget and target already, give no others")
    room, name = room_and_target(budget, target)
    if offload and room is None:
        raise ValueError("offload=True: needs a budget that says how much is enough")
    how = {"offload": offload, "compiler_options": compiler_options}
    options = Options(donate, static, clip, room, name, progress, plan, **how)
    return Scheduled(step, options)


def room_and_target(
    budget: int | str | None, target: str | Target | None
) -> tuple[int | None, str | None]:
    """Bytes, and the name of the chip; a budget without one is for this process's."""
    room = None if budget is None else parse_bytes(budget)
    if room is not None and room <= 0:
        raise ValueError(f"budget={budget!r}: must be more than 0 bytes")
    if target is not None:
        return room, get_target(target).name
    return room, None if room is None else local_target().name


def _many(places) -> tuple[Any, ...]:
    if places is None:
        return ()
    return (places,) if isinstance(places, int | str) else tuple(places)


@dataclass(frozen=True)
class Options:
    """How `schedule` was called."""

    donate: tuple[Any, ...] | None
    static: tuple[Any, ...]
    clip: str | None
    budget: int | None
    target: str | None
    progress: bool
    plan: Plan | None = None
    named: bool = False
    offload: bool = False
    compiler_options: dict[str, Any] | None = None


class Scheduled:
    """A step as `schedule` returns it; behaves like a jitted function."""

    def __init__(self, step, options: "Options"):
        functools.update_wrapper(self, step, updated=())
        self.__wrapped__ = step
        self._options = options
        self._jitted: dict[Any, Any] = {}
        self._found: dict[Any, Found] = {}
        self._warned = options.donate is not None

    def __call__(self, *args, **kwargs):
        """The step's results; its donated arguments are gone afterwards."""
        self._warn(args, kwargs)
        return self._jit(args, kwargs)(*args, **kwargs)

    def trace(self, *args, **kwargs):
        """As `jax.jit(step).trace`."""
        return self._jit(args, kwargs).trace(*args, **kwargs)

    def lower(self, *args, **kwargs):
        """As `jax.jit(step).lower`."""
        return self._jit(args, kwargs).lower(*args, **kwargs)

    def eval_shape(self, *args, **kwargs):
        """As `jax.jit(step).eval_shape`."""
        return self._jit(args, kwargs).eval_shape(*args, **kwargs)

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
        donated, static = self._places(args, kwargs)
        found = self.find(args, kwargs)
        rewritten, scheduled = found.rewritten, found.report
        if rewritten is None:
            rewritten = self.rewritten(found.choice, *args, **kwargs)
        plain = None
        target = target or self._options.target
        if target is not None:
            jitted = jit_with(self.__wrapped__, donated, static)
            own = {"target": target, "compiler_options": self._options.compiler_options}
            plain = estimate(jitted, *args, **own, **kwargs)
            if scheduled is None or get_target(target).name != scheduled.target:
                scheduled = estimate(self, *args, **own, **kwargs)
        notes = () if donated else (undonated(args),)
        aliases = self._aliases(rewritten.jaxpr, args, kwargs, donated)
        return make_plan(rewritten, found, plain, scheduled, aliases, notes)

    def _places(self, args, kwargs) -> tuple[tuple, tuple]:
        """(donated, static) positions and names, those of a jitted step included."""
        donated, static = self._options.donate or (), self._options.static
        if isinstance(self.__wrapped__, jax.stages.Wrapped):
            own = own_arguments(self.__wrapped__, args, kwargs)
            donated = donated or tuple(own[0])
            static = tuple(dict.fromkeys([*static, *own[1]]))
        return donated, static

    def _jit(self, args, kwargs):
        places = self._places(args, kwargs)
        choice = self.find(args, kwargs).choice
        options = self._options.compiler_options
        if options is not None:
            leaves = jax.tree.leaves((args, kwargs))
            if any(isinstance(x, Tracer) for x in leaves):
                options = None  # those of the jit outside hold
        key = places, choice, options is None
        if key not in self._jitted:

            @functools.wraps(self.__wrapped__)
            def scheduled(*args, **kwargs):
                found, leaves, tree = self._rewrite(args, kwargs, places[0], choice)
                return jax.tree.unflatten(tree, _jaxpr.evaluate(found.jaxpr, leaves))

            self._jitted[key] = jit_with(scheduled, *places, options)
        return self._jitted[key]

    def rewritten(self, choice: Choice, *args, **kwargs) -> Rewritten:
        """The step under a choice, for arguments of these shapes."""
        donated, static = self._places(args, kwargs)
        shapes = abstract(args, static), abstract(kwargs, static)
        return self._rewrite(*shapes, donated, choice)[0]

    def _rewrite(
        self, args, kwargs, donated, choice: Choice
    ) -> tuple[Rewritten, list, Any]:
        traced = _jaxpr.trace(self.__wrapped__, *args, **kwargs)
        found = self._rewritten(traced, args, kwargs, donated, choice)
        return found, traced.leaves, traced.out_tree

    def _rewritten(self, traced, args, kwargs, donated, choice: Choice) -> Rewritten:
        aliases = self._aliases(traced.jaxpr, args, kwargs, donated)
        return rewrite(traced.jaxpr, aliases, self._options.clip, choice)

    def _aliases(self, closed, args, kwargs, donated) -> Aliases:
        given = positions(args, kwargs, donated) or range(len(closed.in_avals))
        return by_shape(closed, given)

    def find(self, args, kwargs) -> Found:
        """The choice for arguments of these shapes."""
        budget, target = self._options.budget, self._options.target
        plan = self._options.plan
        if target is None and plan is None:
            return Found(NO_CHOICE)
        donated, static = places = self._places(args, kwargs)
        args, kwargs = abstract(args, static), abstract(kwargs, static)
        leaves, tree = jax.tree.flatten((args, kwargs))
        key = tree, tuple(kind(x) for x in leaves)
        if key not in self._found:
            traced = _jaxpr.trace(self.__wrapped__, *args, **kwargs)
            if plan is not None:
                self._found[key] = loaded(plan, traced.jaxpr)
                return self._found[key]
            assert target is not None
            again = partial(self._rewritten, traced, args, kwargs, donated)
            again = functools.cache(again)  # of the choice
            mark = fingerprint(traced.jaxpr)
            tree = traced.out_tree
            aliases = partial(self._aliases, args=args, kwargs=kwargs, donated=donated)
            options = self._options.compiler_options
            about = places, args, kwargs, target, mark, options
            step = Evaluated(again, aliases, tree, *about)
            name = getattr(self.__wrapped__, "__name__", "the step")
            title = f"scheduling {name} for {target}"
            if budget is not None:
                title += f" in {format_bytes(budget)}"
            with spinner(self._options.progress, title) as tell:
                how = self._options.named, self._options.offload
                self._found[key] = search(step, budget, tell, *how)
        return self._found[key]

    def _warn(self, args, kwargs) -> None:
        """Once: nothing is donated, and nobody said so."""
        if self._warned or any(map(_jaxpr.is_abstract, jax.tree.leaves(args))):
            return
        self._warned = True
        if not self._places(args, kwargs)[0]:
            plan = self.plan(*args, **kwargs)
            warnings.warn("\n".join(plan.notes), stacklevel=3)
