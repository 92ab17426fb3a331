"""The measures in the order in which they are tried: what costs least comes first."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import optax

from jaxmem.advising import forms
from jaxmem.advising._advice import EXACT
from jaxmem.advising.batches import batch_of
from jaxmem.advising.errors import gradient_error, update_error
from jaxmem.frameworks import framework_of

APPROXIMATE = ("bits", "moments", "adama")  # what has to be allowed
BUDGET = "a budget"
MOST = 16  # micro-batches
_CODES = {"save": 8}  # what modules keep
_DERIVATIVES = {"activations": 2}  # what formulas outside of modules keep
_RATE = 1e-3  # bytes do not depend on the learning rate


@dataclass(frozen=True)
class Measure:
    """Something that can be done to a step.

    Attributes:
      name: its name, or those of several together.
      code: the lines to write.
      step: the step, before `jaxmem.schedule`.
      args: what it takes.
      places: which arguments it may reuse, and which are static, as `jax.jit` takes it.
      schedule: the arguments of `jaxmem.schedule`; None where it is left out.
      error: what changes in training.
      kwargs: keyword arguments of the step.
      replaced: how many modules and formulas were substituted, once `step` was traced;
        None where none should be.
    """

    name: str
    code: tuple[str, ...]
    step: Callable
    args: Sequence[Any]
    places: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] | None = None
    error: str = EXACT
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    replaced: Callable[[], int] | None = None

    def after(self, name: str, *lines: str, **changes: Any) -> "Measure":
        """The same with another behind it."""
        name = f"{self.name}, {name}" if self.name else name
        return replace(self, name=name, code=(*self.code, *lines), **changes)


@dataclass(frozen=True)
class Goal:
    """What is to be reached by all measures: the budget, on a chip."""

    target: str
    budget: int
    text: str  # of the budget, as it was given
    step: str = "step"  # what lines call it

    def line(self, places: Mapping[str, Any], budget: bool = False, **more) -> str:
        """The line that schedules a step."""
        words = [json.dumps(self.text)] if budget else []
        options = {"target": self.target, **more, **places}
        text = lambda x: json.dumps(x) if isinstance(x, str) else repr(x)
        words += [f"{name}={text(value)}" for name, value in options.items()]
        return f"{self.step} = jaxmem.schedule({', '.join([self.step, *words])})"


def of_step(
    step: Callable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    places: Mapping[str, Any],
    goal: Goal,
    allow: Sequence[str] = (),
) -> Iterator[Measure]:
    """Of a whole step, whose optimizer is inside of it.

    A model can be substituted that is an argument: an nnx module, or one of linen in a
    TrainState.
    """
    plain = Measure("", (), step, args, places, kwargs=kwargs)
    yield replace(plain, name="nothing")
    lean = forms.lean_step(step, args)
    best = plain
    if lean is not None:
        substituted = _substituted(plain, lean)
        yield substituted
        if lean.replaced():
            # first, since it is mostly the faster one
            best = substituted
            yield _scheduled(goal, best)
    yield _scheduled(goal, plain)
    yield from _in_the_budget(goal, best)
    if "bits" in allow:
        lean = forms.lean_step(step, args, **_CODES)
        assert lean is not None  # checked before
        yield from _all_scheduled(goal, _in_few_bits(best, lean, _CODES))


def of_loss(
    loss_fn: Callable,
    tx: optax.GradientTransformation,
    args: Sequence[Any],
    goal: Goal,
    allow: Sequence[str],
) -> Iterator[Measure]:
    """Of a loss and an optimizer, from which the steps are made here."""
    loss = _Loss(loss_fn, args, goal)
    plain = loss.measure(forms.Lean(loss_fn, args, "", lambda: 0), tx)
    yield replace(plain, name="nothing")
    lean = forms.lean_loss(loss_fn, args)
    substituted = _substituted(plain, lean, **loss.step_of(lean, tx))
    yield substituted
    if lean.replaced():
        yield _scheduled(goal, substituted)
    yield _scheduled(goal, plain)
    if not lean.replaced():
        lean, substituted = replace(lean, fn=loss_fn, args=args, line=""), plain
    yield from _in_the_budget(goal, substituted)
    if goal.target != "cpu":  # its memory is the host's
        yield from _all_scheduled(goal, loss.on_host(substituted, lean, tx))
    yield from _approximate(loss, tx, lean, allow)


@dataclass(frozen=True)
class _Loss:
    """A loss, and the measures that are made of it."""

    fn: Callable
    args: Sequence[Any]
    goal: Goal

    def step_of(self, lean: forms.Lean, tx: Any) -> dict[str, Any]:
        """The step and its arguments, of a measure."""
        step = forms.step_of(lean.fn, tx)
        return {"step": step, "args": forms.step_args(tx, lean.args)}

    def measure(self, lean: forms.Lean, tx: Any) -> Measure:
        places = {"donate_argnums": (0, 1)}
        return Measure("", (), places=places, **self.step_of(lean, tx))

    def with_tx(self, line: str) -> tuple[str, ...]:
        """The lines of another optimizer."""
        return line, *forms.state_lines(self.fn, self.args)

    def on_host(self, measure: Measure, lean: forms.Lean, tx: Any) -> Measure:
        from jaxmem.optim import on_host

        lines = self.with_tx("tx = jaxmem.optim.on_host(tx)")
        of = self.step_of(lean, on_host(tx))
        return measure.after("moments on the host", *lines, **of)


@dataclass(frozen=True)
class _Approximated:
    """A measure with the loss and the optimizer that its step is made of."""

    measure: Measure
    lean: forms.Lean
    tx: Any
    bits: int | None = None  # of the moments


def _approximate(
    loss: _Loss, tx: Any, lean: forms.Lean, allow: Sequence[str]
) -> Iterator[Measure]:
    """What is allowed, alone and together."""
    name, line = ("substitute", (lean.line,)) if lean.line else ("", ())
    plain = replace(loss.measure(lean, tx), name=name, code=line)
    first = _Approximated(plain, lean, tx)
    ways = {"bits": _with_few_bits, "moments": _with_low_moments}
    taken = [way for name, way in ways.items() if name in allow]
    together = first
    for way in taken:
        together = way(loss, together)
    if len(taken) > 1:
        for way in taken:
            yield _scheduled(loss.goal, way(loss, first).measure)
    if taken:
        yield from _all_scheduled(loss.goal, together.measure)
    if "adama" in allow:
        yield from _in_micro_batches(loss, together)


def _with_few_bits(loss: _Loss, one: _Approximated) -> _Approximated:
    """Codes of what modules keep, or of the derivatives of activations."""
    options = _CODES if framework_of(loss.args[0]).lean_layers else _DERIVATIVES
    lean = forms.lean_loss(loss.fn, loss.args, **options)
    of = loss.step_of(lean, one.tx)
    measure = _in_few_bits(one.measure, lean, options, **of)
    return replace(one, measure=measure, lean=lean)


def _in_few_bits(
    measure: Measure, lean: forms.Lean, options: Mapping[str, Any], **of: Any
) -> Measure:
    of = of or {"step": lean.fn, "args": lean.args}
    ((what, bits),) = options.items()
    what = {"save": "activations", "activations": "derivatives"}[what]
    error = f"{what} in {bits} bits: {_percent(gradient_error(options))} of a gradient"
    name = f"substitute with {what} in {bits} bits"
    how = {"name": name, "code": (lean.line,), "replaced": lean.replaced}
    return replace(measure, **how, error=_and(measure.error, error), **of)


def _with_low_moments(loss: _Loss, one: _Approximated) -> _Approximated:
    from jaxmem.optim import adama

    tx = adama(_RATE, bits=8)
    lines = loss.with_tx("tx = jaxmem.adama(learning_rate, bits=8)")
    error = f"moments in 8 bits: {_percent(update_error(bits=8))} of an update"
    of = {**loss.step_of(one.lean, tx), "error": _and(one.measure.error, error)}
    measure = one.measure.after("8-bit moments", *lines, **of)
    return replace(one, measure=measure, tx=tx, bits=8)


def _in_micro_batches(loss: _Loss, one: _Approximated) -> Iterator[Measure]:
    """AdamA over 2, 4, ... micro-batches; then the most of them within the budget."""
    from jaxmem.accumulate import microbatch
    from jaxmem.optim import adama

    batch = batch_of(loss.fn, one.lean.fn, loss.args)
    tx = adama(_RATE, bits=one.bits)
    model, state, *_ = forms.step_args(tx, one.lean.args)
    words = "learning_rate" if one.bits is None else f"learning_rate, bits={one.bits}"
    # the lines of 8-bit moments have made this optimizer already
    lines = () if one.bits else loss.with_tx(f"tx = jaxmem.adama({words})")
    last = None
    for n in (2**k for k in range(1, MOST.bit_length())):
        if batch.examples % n:
            break
        error = f"AdamA: {_percent(update_error(bits=one.bits, n=n))} of an update"
        line = f"step = jaxmem.microbatch({batch.written}, tx, n={n})"
        last = one.measure.after(
            f"AdamA over {n} micro-batches",
            *(*lines, line, f"# {batch.call}"),
            step=microbatch(batch.loss, tx, n),
            args=(model, state, *batch.args),
            places={},
            error=_and(one.measure.error, error),
        )
        yield last
    if last is not None:
        yield from _in_the_budget(replace(loss.goal, step="step"), last)


def _substituted(measure: Measure, lean: forms.Lean, **of: Any) -> Measure:
    of = of or {"step": lean.fn, "args": lean.args}
    return measure.after("substitute", lean.line, replaced=lean.replaced, **of)


def _all_scheduled(goal: Goal, measure: Measure) -> Iterator[Measure]:
    """Scheduled at no cost; under the budget; and with the host's memory."""
    yield _scheduled(goal, measure)
    yield from _in_the_budget(goal, measure)


def _scheduled(goal: Goal, measure: Measure) -> Measure:
    return measure.after("schedule", goal.line(measure.places), schedule={})


def _in_the_budget(goal: Goal, measure: Measure) -> Iterator[Measure]:
    """Recomputed, in tiles and in micro-batches; then also with the host's memory."""
    for more, words in (({}, BUDGET), ({"offload": True}, f"{BUDGET}, the host")):
        line = goal.line(measure.places, budget=True, **more)
        options = {"budget": goal.budget, **more}
        yield measure.after(f"schedule with {words}", line, schedule=options)


def _and(error: str, more: str) -> str:
    return more if error == EXACT else f"{error}; {more}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"
