"""What differs between frameworks: a model, the step of its loss, lines to write."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jaxmem.frameworks import framework_of, map_arrays
from jaxmem.nn import report, substitute

Args = Sequence[Any]


@dataclass(frozen=True)
class Lean:
    """A loss or a step with its arguments, one of them or itself substituted.

    Attributes:
      fn: the loss or the step.
      args: its arguments.
      line: the line that does it.
      replaced: how many modules and formulas were; known once `fn` was traced.
    """

    fn: Callable
    args: Args
    line: str
    replaced: Callable[[], int]


def name_of(fn: Callable, default: str) -> str:
    """What a line calls a function."""
    name = getattr(fn, "__name__", default)
    return name if name.isidentifier() else default


def parameters(fn: Callable, n: int) -> list[str]:
    """The names of the first `n` positional parameters."""
    places = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    known = inspect.signature(fn).parameters.values()
    found = [p.name for p in known if p.kind in places]
    return [*found, *(f"args_{i}" for i in range(len(found), n))][:n]


def lean_loss(loss_fn: Callable, args: Args, **options: Any) -> Lean:
    """Of a loss: its model where that has lean layers, else the loss itself."""
    if _model_in(args[0]) is not None:
        return lean_argument(loss_fn, args, 0, **options)
    lean, name = substitute(loss_fn, **options), name_of(loss_fn, "loss_fn")
    line = f"{name} = jaxmem.substitute({name}{_written(options)})"
    return Lean(lean, args, line, lambda: report(lean).replaced())


def lean_step(step: Callable, args: Args, **options: Any) -> Lean | None:
    """Of a step, the first argument with a model in it; None where there is none."""
    found = [i for i, x in enumerate(args) if _model_in(x) is not None]
    return lean_argument(step, args, found[0], **options) if found else None


def lean_argument(fn: Callable, args: Args, place: int, **options: Any) -> Lean:
    """The call with a lean model, or with one in a TrainState."""
    name, given = parameters(fn, place + 1)[-1], args[place]
    framework = framework_of(given)
    model = substitute(framework.model_in(given), **options)
    line = framework.substitute_line(name, _written(options))
    args = *args[:place], framework.with_model(given, model), *args[place + 1 :]
    return Lean(fn, args, line, lambda: report(model).replaced())


def _model_in(x: Any) -> Any | None:
    return framework_of(x).model_in(x)


def _written(options: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items())


def step_of(loss_fn: Callable, tx: optax.GradientTransformation) -> Callable:
    """A training step as one writes it, for a model of any framework."""

    def step(model, state, *args):
        return framework_of(model).train_step(loss_fn, tx, model, state, args)

    step.__name__ = getattr(loss_fn, "__name__", "loss_fn")
    return step


def step_args(tx: optax.GradientTransformation, args: Args) -> tuple:
    """(model, optimizer or its state, the loss's other arguments).

    All but the others are abstract; moments lie where their parameters do.
    """
    from jaxmem.optim import abstract_state

    model, *rest = args
    abstract = map_arrays(_struct, model)
    state = framework_of(model).abstract_state(abstract, tx, abstract_state)
    return abstract, state, *rest


def state_lines(loss_fn: Callable, args: Args) -> tuple[str, ...]:
    """The line that makes the state of another optimizer."""
    (name,) = parameters(loss_fn, 1)
    return (framework_of(args[0]).state_line(name),)


def _struct(x) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
