"""`schedule`: a train step like the one given, with less alive at its peak."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmem import _jaxpr
from jaxmem.memory import Target, estimate
from jaxmem.memory._jitted import own_arguments
from jaxmem.scheduling._passes import Rewritten, by_shape, rewrite
from jaxmem.scheduling._plan import Plan, make_plan

Places = int | Sequence[int]
Names = str | Sequence[str]


def schedule(
    step: Callable,
    *,
    donate_argnums: Places | None = None,
    donate_argnames: Names | None = None,
    static_argnums: Places = (),
    static_argnames: Names = (),
    clip: str | None = None,
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
    - *Order.* Layers that are unrolled are updated right after their gradient: a
      barrier keeps the compiler from putting all updates last.

    The results are those of the step, to rounding: operations are moved, not changed,
    and a sum over layers may be taken in another order.

    Args:
      step: any function that `jax.jit` takes, already jitted or not; a jitted one
        brings its own donated arguments along. It should contain the gradient and the
        update.
      donate_argnums: positional arguments whose buffers the step may reuse: the
        parameters and the optimizer state, or nothing is updated in place.
      donate_argnames: the same for keyword arguments.
      static_argnums: positional arguments that are Python values, not arrays.
      static_argnames: the same for keyword arguments.
      clip: "two_pass" for a step whose update needs a number made of all gradients, as
        clipping by the global norm does: a first backward pass finds the number, a
        second updates. Costs one more backward pass through the scanned layers. By
        default such a step keeps its stacked gradients, and `plan` names the operation.

    Returns:
      A `Scheduled` step: call it, give it to `jaxmem.estimate` or another `jax.jit`,
      lower it, or ask it for its `plan`.

    Raises:
      TypeError: `step` is not callable.
      ValueError: `clip` is another word.

    Example::

      step = jaxmem.schedule(step, donate_argnums=(0,))
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
    return Scheduled(step, donate, static, clip)


def _many(places) -> tuple[Any, ...]:
    if places is None:
        return ()
    return (places,) if isinstance(places, int | str) else tuple(places)


class Scheduled:
    """A step as `schedule` returns it; behaves like a jitted function."""

    def __init__(self, step, donate, static, clip):
        functools.update_wrapper(self, step, updated=())
        self.__wrapped__ = step
        self._donate, self._static, self._clip = donate, static, clip
        self._jitted: dict[Any, Any] = {}
        self._warned = donate is not None

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
        abstract = _abstract(args, static), _abstract(kwargs, static)
        found = self._rewrite(*abstract, donated)[0]
        reports = ()
        if target is not None:
            plain = _jit(self.__wrapped__, donated, static)
            reports = tuple(
                estimate(fn, *args, target=target, **kwargs) for fn in (plain, self)
            )
        return make_plan(found, reports, undonated=None if donated else args)

    def _places(self, args, kwargs) -> tuple[tuple, tuple]:
        """(donated, static) positions and names, those of a jitted step included."""
        donated, static = self._donate or (), self._static
        if isinstance(self.__wrapped__, jax.stages.Wrapped):
            own = own_arguments(self.__wrapped__, args, kwargs)
            donated = donated or tuple(own[0])
            static = tuple(dict.fromkeys([*static, *own[1]]))
        return donated, static

    def _jit(self, args, kwargs):
        places = self._places(args, kwargs)
        if places not in self._jitted:

            @functools.wraps(self.__wrapped__)
            def scheduled(*args, **kwargs):
                found, leaves, tree = self._rewrite(args, kwargs, places[0])
                return jax.tree.unflatten(tree, _jaxpr.evaluate(found.jaxpr, leaves))

            self._jitted[places] = _jit(scheduled, *places)
        return self._jitted[places]

    def _rewrite(self, args, kwargs, donated) -> tuple[Rewritten, list, Any]:
        traced = _jaxpr.trace(self.__wrapped__, *args, **kwargs)
        given = _positions(args, kwargs, donated) or range(len(traced.leaves))
        aliases = by_shape(traced.jaxpr, given)
        found = rewrite(traced.jaxpr, aliases, self._clip)
        return found, traced.leaves, traced.out_tree

    def _warn(self, args, kwargs) -> None:
        """Once: nothing is donated, and nobody said so."""
        if self._warned or any(map(_jaxpr.is_abstract, jax.tree.leaves(args))):
            return
        self._warned = True
        if not self._places(args, kwargs)[0]:
            plan = self.plan(*args, **kwargs)
            warnings.warn("\n".join(plan.notes), stacklevel=3)


def _jit(fn: Callable, donated: Sequence, static: Sequence):
    """`jax.jit` with places that are positions or names."""

    def split(places) -> tuple[list[int] | None, list[str] | None]:
        numbers = [p for p in places if isinstance(p, int)]
        # None lets jit find positions by names and names by positions
        return numbers or None, [p for p in places if isinstance(p, str)] or None

    (donate_argnums, donate_argnames), (static_argnums, static_argnames) = map(
        split, (donated, static)
    )
    return jax.jit(
        fn,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
    )


def _abstract(arguments, static: Sequence):
    """Shapes and dtypes of all that is not static, Python scalars included."""
    count = len(arguments)
    static = [p + count if isinstance(p, int) and p < 0 else p for p in static]
    items = arguments.items() if isinstance(arguments, dict) else enumerate(arguments)
    made = {k: v if k in static else jax.tree.map(_aval, v) for k, v in items}
    return made if isinstance(arguments, dict) else tuple(made.values())


def _aval(leaf):
    if isinstance(leaf, bool | int | float | complex):
        return jax.eval_shape(lambda x: x, leaf)
    return leaf


def _positions(args, kwargs, places: Sequence) -> list[int]:
    """Which of the array leaves belong to these arguments."""
    found, count = [], 0
    for place, value in [*enumerate(args), *sorted(kwargs.items())]:
        leaves = [x for x in jax.tree.leaves(value) if _jaxpr.is_array(x)]
        if place in places or (isinstance(place, int) and place - len(args) in places):
            found += range(count, count + len(leaves))
        count += len(leaves)
    return found
