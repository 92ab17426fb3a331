"""The plan of a call: what is found for it, and both steps as they are compiled."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from jaxmem.chips import get_target
from jaxmem.faults import WHAT_IS_DONE, devices_of, has_sums_apart
from jaxmem.frameworks import Call
from jaxmem.ir.auto_axes import on_auto_axes
from jaxmem.ir.shard_maps import whole_step
from jaxmem.memory import Pending, Target
from jaxmem.scheduling._arguments import abstract, check_fixed_sizes, on_one_device
from jaxmem.scheduling._finder import Finder
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling._shardings import mesh_of
from jaxmem.scheduling._traced_calls import TracedCalls
from jaxmem.scheduling.plan.capacity import capacity_notes
from jaxmem.scheduling.plan.notes import notes_of
from jaxmem.scheduling.plan.plan import Plan, make_plan, undonated
from jaxmem.scheduling.search.compiles import Compared, compared
from jaxmem.scheduling.search.result import SearchResult


def planned(
    finder: Finder,
    args: tuple,
    kwargs: dict,
    target: str | Target | None,
    begun: Callable[..., Pending],
) -> Plan:
    """The plan of a call.

    Args:
      finder: of the step.
      args: of the call.
      kwargs: of the call.
      target: the chip that both steps are compiled for; None: neither is.
      begun: starts a compile, of the original step or as it is scheduled.
    """
    calls = finder.calls
    with calls.open(args, kwargs, target) as call:
        check_fixed_sizes("plan", (call.args, call.kwargs))
        call.check_donated(calls.step)
        found = finder.find(call)
        if not found.fingerprint:  # there was no search
            own = calls.abstract(call)
            found = replace(found, fingerprint=finder.mark(own, calls.trace(own)))
        rewritten = found.rewritten
        if rewritten is None:
            rewritten = calls.rewrite(calls.abstract(call), found.choice)[0]
        if not call.inside and on_one_device((call.args, call.kwargs)):
            calls.check_memories(rewritten.jaxpr, call)
        if call.form.as_it_is:  # where a jitted step says its arguments are
            args, kwargs = calls.shardings(call).of(abstract((args, kwargs)))
    target = calls.options.target if target is None else target
    both, chip = Compared(None, None), ""
    if target is not None:
        chip = get_target(target).name
        both = _compared(found, chip, partial(begun, args, kwargs, target))
    aliases = calls.aliases(rewritten.jaxpr, call)
    shardings = calls.input_shardings(rewritten.jaxpr, call)
    mesh = mesh_of(calls.given(call))
    with on_auto_axes():
        notes = (*found.notes, *_notes(calls, call, rewritten, found))
        notes += (*capacity_notes(rewritten.written_out, both.scheduled),)
        return make_plan(rewritten, found, both, chip, aliases, notes, shardings, mesh)


def _compared(
    found: SearchResult, chip: str, begun: Callable[..., Pending]
) -> Compared:
    """Both reports; that of the scheduled step may be known from the search."""
    same = found.report is not None and chip == found.report.target
    known, products = (found.report, found.products) if same else (None, None)
    plain, own = (partial(begun, scheduled=scheduled) for scheduled in (False, True))
    return compared(plain, own, known, products)


def _notes(
    calls: TracedCalls, call: Call, rewritten: Rewritten, found: SearchResult
) -> list[str]:
    notes = [] if call.form.donated else [undonated(call.args)]
    notes += notes_of(rewritten, found.choice.unchanged)
    notes += _unknown_shards(calls, call, rewritten.jaxpr)
    if rewritten.types is not None:
        notes.append(_TYPES)
    sharded = call.inside or devices_of(calls.given(call)) > 1
    if has_sums_apart(rewritten.written_out, sharded):
        notes.append(WHAT_IS_DONE)
    return notes


_TYPES = (
    "its explicit axes are scheduled as Auto ones: what types say of shardings is said "
    "by constraints, and its results have the types that they had"
)


def _unknown_shards(calls: TracedCalls, call: Call, closed) -> list[str]:
    """A sentence where arguments are sharded in a way that is not known."""
    if not calls.given(call) or calls.input_shardings(closed, call) is not None:
        return []
    if whole_step(closed) is not None:  # its shapes are those of one device
        return []
    return [
        "its arguments are sharded over several meshes: how the arrays in between are "
        "is not known, and bytes that no compiler has told are those of whole arrays"
    ]
