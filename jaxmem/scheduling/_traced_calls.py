"""How the calls of a step are traced, and rewritten under a choice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxmem.chips import get_target, traced_for
from jaxmem.faults import devices_of, with_sums_apart
from jaxmem.frameworks import Call, pure_call
from jaxmem.ir import jaxprs
from jaxmem.ir.auto_axes import on_auto_axes
from jaxmem.ir.graph import Aliases, by_shape
from jaxmem.ir.host_slices import with_hidden_indices
from jaxmem.ir.shards import InputShardings, of_shardings
from jaxmem.scheduling._arguments import abstract, check_memories, positions
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._options import Options
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling._remembered import Remembered
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling._shardings import (
    NO_SHARDINGS,
    JitShardings,
    Placed,
    argument_shardings,
    placed,
    shardings_of,
    with_results_placed,
)


@dataclass
class TracedCalls:
    """The calls of one step.

    Attributes:
      step: the original one.
      options: how `schedule` was called.
    """

    step: Callable
    options: Options
    _places: dict[Any, JitShardings] = field(default_factory=dict)

    @contextmanager
    def open(self, args, kwargs, target=None) -> Iterator[Call]:
        given = self.options
        target = given.target if target is None else target
        chip = None if target is None else get_target(target)
        own = self.step, args, kwargs, given.donate, given.static
        with traced_for(chip), pure_call(*own) as call:
            yield call

    def rewrite(
        self, call: Call, choice: Choice, given: tuple[Any, ...] | None = None
    ) -> tuple[Rewritten, list, Any]:
        traced = self.trace(call)
        found = self.rewritten(traced, call, None, choice, given=given)
        return found, traced.leaves, traced.out_tree

    def trace(self, call: Call) -> Placed:
        step = call.form.pure(self.step)
        traced = jaxprs.trace(step, *call.args, **call.kwargs)
        return placed(traced, call.own.placed)

    def shardings(self, call: Call) -> JitShardings:
        if not call.own.placed:
            return NO_SHARDINGS
        if call.signature not in self._places:
            arguments = abstract((call.args, call.kwargs))
            step = call.form.pure(self.step)
            traced = jaxprs.trace(step, *arguments[0], **arguments[1])
            tree = jax.tree.structure(arguments)
            self._places[call.signature] = shardings_of(traced, tree)
        return self._places[call.signature]

    def abstract(self, call: Call) -> Call:
        arguments = abstract((call.args, call.kwargs))
        args, kwargs = self.shardings(call).of(arguments)
        return replace(call, args=args, kwargs=kwargs)

    def rewritten(
        self,
        traced: Placed,
        call: Call,
        known: Remembered | None,
        choice: Choice,
        ordered: bool = True,
        given: tuple[Any, ...] | None = None,
    ) -> Rewritten:
        aliases = self.aliases(traced.jaxpr, call)
        if given is None:
            given = argument_shardings((call.args, call.kwargs), traced.ins)
        how = self.options.clip, choice, given, known, ordered
        with on_auto_axes():
            found = rewrite(traced.jaxpr, aliases, *how)
            if not ordered:
                return found
            closed = with_results_placed(found.jaxpr, traced.outs)
            # in another function nobody knows where arguments are
            sharded = call.inside or devices_of(given) > 1
            closed = with_sums_apart(with_hidden_indices(closed), sharded)
        return replace(found, jaxpr=closed, types=traced.types)

    def given(self, call: Call) -> tuple[Any, ...]:
        """The shardings of the arguments."""
        named = self.shardings(call).ins
        return argument_shardings((call.args, call.kwargs), named)

    def input_shardings(self, closed, call: Call) -> InputShardings | None:
        """How the inputs of the step are sharded over devices."""
        return of_shardings(closed, self.given(call))

    def aliases(self, closed, call: Call) -> Aliases:
        given = positions(call.args, call.kwargs, call.form.donated)
        if self.undecided(call):
            given = range(len(closed.in_avals))
        return by_shape(closed, given)

    def check_memories(self, closed, call: Call) -> None:
        given = positions(call.args, call.kwargs, call.form.donated)
        check_memories(closed, given, (call.args, call.kwargs))

    def undecided(self, call: Call) -> bool:
        """Whether a function round the step says what is donated."""
        return call.inside and self.options.donate is None and not call.form.donated

    def compiler_options(self, call: Call) -> dict[str, Any] | None:
        if self.options.compiler_options is not None:
            return self.options.compiler_options
        return call.own.compiler_options
