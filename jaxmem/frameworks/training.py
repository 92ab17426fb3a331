"""A training step as the users of a framework call it, round an update of pytrees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

Path = tuple[Any, ...]
Wanted = Callable[[Path, Any], bool]

# Flax's collection of scales and histories whose gradient is their new value.
OVERWRITE = "_overwrite_with_gradient"


@dataclass(frozen=True)
class Held:
    """What the model of a step holds, as pytrees.

    Attributes:
      params: what the optimizer updates.
      model: `(params) -> model`, what the loss function takes; `(params, state)` where
        it holds its own state.
      state: what else of the model a loss function changes in place.
      state_of: `(model, params) -> state`, after the loss function; None where no model
        holds its own.
    """

    params: Any
    model: Callable[..., Any]
    state: Any = None
    state_of: Callable[[Any, Any], Any] | None = None


class UpdatedModel(Protocol):
    """What a mini-batch changes."""

    @property
    def params(self) -> Any: ...
    @property
    def opt_state(self) -> Any: ...
    @property
    def model_state(self) -> Any: ...
    @property
    def metrics(self) -> dict[str, Any]: ...
    @property
    def updated(self) -> Any:
        """Whether there was an update: a bool scalar, or None for always."""
        ...


class ModelUpdate(Protocol):
    """The update of one mini-batch, of a loss function and an optimizer."""

    def __call__(
        self, held: Held, opt_state: Any, model_state: Any, batch: Any, rng: Any
    ) -> UpdatedModel: ...


class StepForm(NamedTuple):
    """How a step is called with the objects of a framework."""

    # the step, of the user's own arguments; it is traced, donated and scheduled
    run: Callable
    donate: tuple[int, ...]  # the positions of the arguments that it replaces
    # `(args) -> opt_state`, where a step finds the optimizer's state
    state_in: Callable
    state_out: Callable  # `(args, out) -> opt_state`, where it is after a call
    # raises for arguments of the wrong kind, before each call
    check: Callable[[Sequence[Any]], None] = lambda args: None


def functional_form(
    held_of: Callable[[Any], Held], update: ModelUpdate, has_model_state: bool
) -> StepForm:
    """(params, opt_state, [model_state,] batch, rng) -> the new ones, and metrics."""

    def updated(params, opt_state, model_state, batch, rng):
        held = held_of(params)
        out = update(held, opt_state, model_state, batch, rng)
        return held.model(out.params), out

    def microbatch_step(params, opt_state, batch, rng=None):
        new, out = updated(params, opt_state, None, batch, rng)
        return new, out.opt_state, out.metrics

    def microbatch_step_with_state(params, opt_state, model_state, batch, rng=None):
        new, out = updated(params, opt_state, model_state, batch, rng)
        return new, out.opt_state, out.model_state, out.metrics

    run, donate = microbatch_step, (0, 1)
    if has_model_state:
        run, donate = microbatch_step_with_state, (0, 1, 2)
    return StepForm(run, donate, lambda args: args[1], lambda args, out: out[1])


def next_step(step: jax.Array, updated: Any) -> jax.Array:
    """The number of updates, which grows by one if there was an update."""
    if updated is None:
        return step + 1
    return step + updated.astype(jax.typeof(step).dtype)
