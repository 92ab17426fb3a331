"""`advise`: measures compiled one after another, until one fits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optax

from jaxmem._bytes import format_bytes, parse_bytes
from jaxmem._checks import (
    check_bool,
    check_callable,
    check_places,
    wrong_type,
    wrong_value,
)
from jaxmem._progress import spinner
from jaxmem.advising import forms
from jaxmem.advising._advice import Advice, CompiledMeasure
from jaxmem.advising.batches import batch_of
from jaxmem.advising.measures import APPROXIMATE, Goal, Measure, of_loss, of_step
from jaxmem.chips import Target, get_target, local_target
from jaxmem.memory import DoesNotFit, MemoryReport, estimate
from jaxmem.scheduling.plan.rows import WHOLE_STEP
from jaxmem.scheduling.plan.text import count_of

Places = int | Sequence[int]
Names = str | Sequence[str]


def advise(
    fn: Callable,
    *args: Any,
    tx: optax.GradientTransformation | None = None,
    target: str | Target | None = None,
    budget: int | str | None = None,
    allow: str | Sequence[str] = (),
    donate_argnums: Places | None = None,
    donate_argnames: Names | None = None,
    static_argnums: Places | None = None,
    static_argnames: Names | None = None,
    every: bool = False,
    progress: bool = True,
    **kwargs: Any,
) -> Advice:
    """Finds out what makes a training step fit, by compiling techniques until one does.

    Exact techniques come first, the fastest before the others: nothing; `substitute`;
    `substitute` and `schedule`; `schedule` alone; `schedule` with the budget, which
    recomputes, runs regions in tiles and the step in micro-batches as far as needed;
    the same with residuals offloaded to the host; the optimizer's state on the host.
    Then the approximate techniques in `allow`, alone and combined. The bytes are those
    of the compiled step.

    Args:
      fn: a training step, jitted or not, of any framework; or, with `tx`, a loss
        `(model, batch, ...) -> scalar`, from which the step is built. The model is a
        pytree of parameters, an nnx module or an Equinox module.
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct` in any pytrees. In a step
        an nnx module is substituted, and the linen module of a TrainState, whose
        `apply_fn` the step must then call.
      tx: the optimizer, for a loss; other optimizers are then tried.
      target: a chip of `jaxmem.targets()`; that of this process by default.
      budget: bytes on one device, or a text like "14GiB"; what the chip has by default.
      allow: approximate techniques to try after the exact ones. "bits": what
        modules keep in 8 bits, or, of a loss of parameters or of an Equinox module,
        derivatives of activations in 2; for a loss also "moments": Adam's moments in 8
        bits, and "adama": AdamA over 2 to 16 micro-batches, instead of `tx`.
      donate_argnums: arguments whose buffers the step may reuse; a jitted step brings
        its own, and for a loss they are the parameters and the optimizer's state.
      donate_argnames: the same for keyword arguments.
      static_argnums: positional arguments that are Python values, not arrays.
      static_argnames: the same for keyword arguments.
      every: whether the techniques after the first that fits are compiled too.
      progress: show what is being compiled, where the output is a terminal.
      **kwargs: the step's keyword arguments.

    Returns:
      An `Advice`: it prints as a table of techniques with bytes, predicted milliseconds
      and error, and the code to write.

    Raises:
      TypeError: no function, a loss that is no scalar, an argument that is no array.
      ValueError: an unknown target or technique, no budget for a target without one; a
        technique that does not apply to this step or loss.

    Example::

      advice = jaxmem.advise(step, state, batch, target="l4", budget="16GiB")
      print(advice)
    """
    check_callable("fn", fn)
    check_bool("every", every)
    if tx is not None and not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise wrong_type("tx", tx, "an optax.GradientTransformation")
    check_bool("progress", progress)
    allow = _allowed(allow, fn, args, tx)
    chip = local_target() if target is None else get_target(target)
    room = chip.memory_bytes if budget is None else parse_bytes(budget, "budget")
    if room is None or room <= 0:
        allowed = "must be more than 0 bytes, such as '14GiB'"
        known = "" if budget is not None else f"; {chip.name} has no memory of its own"
        raise ValueError(f"budget={budget!r}: {allowed}{known}")
    text = format_bytes(room).replace(" ", "") if budget is None else str(budget)
    name = "step" if tx is not None else forms.name_of(fn, "step")
    goal = Goal(chip.name, room, text, name)
    given = {
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
    }
    places = {name: value for name, value in given.items() if value is not None}
    if tx is None:
        check_places(**places)
        measures = of_step(fn, args, kwargs, places, goal, allow)
    else:
        _check_loss(args, kwargs | places)
        if "adama" in allow:
            batch_of(fn, fn, args)  # an error before anything is compiled
        measures = of_loss(fn, tx, args, goal, allow)
    tried = tuple(_tried(measures, goal, every, progress))
    return Advice(getattr(fn, "__name__", "step"), chip.name, room, tried)


def _allowed(allow: str | Sequence[str], fn, args, tx) -> tuple[str, ...]:
    if not isinstance(allow, str | Sequence):
        raise wrong_type("allow", allow, f"some of {APPROXIMATE}")
    names = (allow,) if isinstance(allow, str) else tuple(allow)
    for name in names:
        if name not in APPROXIMATE:
            raise wrong_value("allow", name, f"one of {APPROXIMATE}")
    if tx is not None:
        return names
    if "bits" in names and forms.lean_step(fn, args) is None:
        raise ValueError(
            f"allow={allow!r}: no argument of the step has a model in it (an nnx "
            "module, a TrainState of linen); give the loss, and tx="
        )
    if set(names) - {"bits"}:
        raise ValueError(
            f"allow={allow!r}: a step has its optimizer inside; give the loss, and tx="
        )
    return names


def _check_loss(args: Sequence[Any], others: Mapping[str, Any]) -> None:
    if not args:
        raise TypeError(
            "a loss takes params first: advise(loss_fn, params, batch, tx=)"
        )
    for name in others:
        raise TypeError(f"{name}=: with tx= the loss takes positional arguments alone")


def _tried(
    measures: Iterator[Measure], goal: Goal, every: bool, progress: bool
) -> Iterator[CompiledMeasure]:
    with spinner(progress, "advise") as tell:
        for measure in measures:
            tell(measure.name)
            found = _compiled(measure, goal)
            yield found
            if found.fits and not every:
                return


def _compiled(measure: Measure, goal: Goal) -> CompiledMeasure:
    from jaxmem.scheduling import BudgetError, schedule

    about: dict[str, Any] = {
        "name": measure.name,
        "code": measure.code,
        "error": measure.error,
    }
    try:
        if measure.schedule is None:
            how = {"target": goal.target, **measure.places}
            report = estimate(measure.step, *measure.args, **how, **measure.kwargs)
            why = "nothing was substituted" if _left_as_it_is(measure) else ""
            return CompiledMeasure(**about, why=why, **_bytes(report, goal))
        how = {"target": goal.target, "progress": False, **measure.places}
        step = schedule(measure.step, **measure.schedule, **how)
        plan = step.plan(*measure.args, **measure.kwargs)
    except BudgetError as error:
        why = str(error).splitlines()[0].removesuffix(", of which the largest are")
        return CompiledMeasure(**about, peak_bytes=error.least, fits=False, why=why)
    except DoesNotFit as error:
        why = str(error).splitlines()[0]
        return CompiledMeasure(**about, peak_bytes=None, fits=False, why=why)
    if plan.scheduled is None:
        return CompiledMeasure(
            **about, peak_bytes=None, fits=False, why="the compiler refused it"
        )
    cost: dict[str, Any] = {
        "recomputed_flops": plan.recomputed_flops,
        "recomputed_seconds": plan.recomputed_seconds,
        "tile_seconds": plan.tile_seconds,
        "host_seconds": plan.host_seconds,
        "done": _done(plan),
    }
    return CompiledMeasure(**about, **cost, **_bytes(plan.scheduled, goal))


def _left_as_it_is(measure: Measure) -> bool:
    return measure.replaced is not None and not measure.replaced()


def _done(plan: Any) -> tuple[str, ...]:
    """What a plan does that costs time."""
    batches = [row.n for row in plan.tiles if row.path == WHOLE_STEP]
    regions = len(plan.tiles) - len(batches)
    moved, kept = plan.host_traffic_bytes, plan.offloaded_bytes
    found = {
        f"{count_of(len(plan.recomputed), 'operation')} recomputed": plan.recomputed,
        f"{count_of(regions, 'region')} in tiles": regions,
        **{f"the whole step in {n} micro-batches": n for n in batches},
        f"{format_bytes(kept)} of residuals in the host's memory": kept,
        f"{format_bytes(moved)} to the host and back": moved,
    }
    return tuple(words for words, there in found.items() if there)


def _bytes(report: MemoryReport, goal: Goal) -> dict[str, Any]:
    peak = report.peak_bytes
    fits = peak <= goal.budget
    return {
        "peak_bytes": peak,
        "fits": fits,
        "sent_bytes": report.sent_bytes,
        "predicted_seconds": report.seconds,
    }
