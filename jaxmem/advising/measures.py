"""The measures in the order in which they are tried: what costs least comes first."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import optax

from jaxmem.advising._advice import EXACT

BUDGET = "a budget"


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
    """

    name: str
    code: tuple[str, ...]
    step: Callable
    args: Sequence[Any]
    places: Mapping[str, Any]
    schedule: Mapping[str, Any] | None = None
    error: str = EXACT
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Goal:
    """What is to be reached by all measures: the budget, on a chip."""

    target: str
    budget: int
    text: str  # of the budget, as it was given

    def line(self, places: Mapping[str, Any], budget: bool = False, **more) -> str:
        """The line that schedules a step."""
        words = [json.dumps(self.text)] if budget else []
        options = {"target": self.target, **more, **places}
        text = lambda x: json.dumps(x) if isinstance(x, str) else repr(x)
        words += [f"{name}={text(value)}" for name, value in options.items()]
        return f"step = jaxmem.schedule({', '.join(['step', *words])})"


def of_step(
    step: Callable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    places: Mapping[str, Any],
    goal: Goal,
) -> Iterator[Measure]:
    """Of a whole step, whose optimizer and model are inside of it."""
    how = {"step": step, "args": args, "places": places, "kwargs": kwargs}
    yield Measure("nothing", (), **how)
    yield from _scheduled(goal, "", (), **how)


def of_loss(
    loss_fn: Callable,
    tx: optax.GradientTransformation,
    args: Sequence[Any],
    goal: Goal,
    allow: Sequence[str],
) -> Iterator[Measure]:
    """Of a loss and an optimizer, from which the steps are made here."""
    from jaxmem.nn import substitute

    plain = step_of(loss_fn, tx)
    how = {"args": step_args(tx, args), "places": {"donate_argnums": (0, 1)}}
    yield Measure("nothing", (), step=plain, **how)
    lean = step_of(substitute(loss_fn), tx)
    line = ("loss_fn = jaxmem.substitute(loss_fn)",)
    yield Measure("substitute", line, step=lean, **how)
    yield from _scheduled(goal, "", (), step=plain, **how, budgets=False)
    yield from _scheduled(goal, "substitute, ", line, step=lean, **how)
    if "moments" not in allow:
        return
    low = low_bit_adam()
    how["args"] = step_args(low, args)
    lines = (*line, "tx = jaxmem.adama(learning_rate, bits=8)")
    error = f"moments in 8 bits: {100 * update_error():.2g} % of an update"
    name = "substitute, 8-bit moments, "
    both = step_of(substitute(loss_fn), low)
    yield from _scheduled(goal, name, lines, step=both, error=error, **how)


def _scheduled(
    goal: Goal,
    name: str,
    code: tuple[str, ...],
    *,
    places: Mapping[str, Any],
    budgets: bool = True,
    **how: Any,
) -> Iterator[Measure]:
    """Scheduled at no cost; under the budget; and with the host's memory."""
    how["places"] = places
    line = goal.line(places)
    yield Measure(f"{name}schedule", (*code, line), schedule={}, **how)
    if not budgets:
        return
    for more, words in (({}, BUDGET), ({"offload": True}, f"{BUDGET}, the host")):
        line = goal.line(places, budget=True, **more)
        options = {"budget": goal.budget, **more}
        words = f"{name}schedule with {words}"
        yield Measure(words, (*code, line), schedule=options, **how)


def step_of(loss_fn: Callable, tx: optax.GradientTransformation) -> Callable:
    """A training step as one writes it."""

    def step(params, opt_state, *args):
        loss, grads = jax.value_and_grad(loss_fn)(params, *args)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    step.__name__ = getattr(loss_fn, "__name__", "loss_fn")
    return step


def step_args(tx: optax.GradientTransformation, args: Sequence[Any]) -> tuple:
    """(params, state, the loss's other arguments), all but these abstract."""
    params, *rest = args
    abstract = jax.tree.map(_struct, params)
    state = jax.eval_shape(tx.init, abstract)
    return abstract, _placed(state, abstract), *rest


def _placed(state: Any, params: Any) -> Any:
    """The state with moments that lie where their parameters do."""
    shape = lambda tree: [getattr(x, "shape", None) for x in jax.tree.leaves(tree)]
    like = jax.tree.structure(params), shape(params)
    is_like = lambda tree: (jax.tree.structure(tree), shape(tree)) == like
    place = lambda x, p: _struct(x, p.sharding)
    one = lambda tree: jax.tree.map(place, tree, params) if is_like(tree) else tree
    return jax.tree.map(one, state, is_leaf=is_like)


def _struct(x, sharding: Any = None) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None) if sharding is None else sharding
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def low_bit_adam() -> optax.GradientTransformation:
    """Adam with moments in 8 bits; its bytes do not depend on the learning rate."""
    from jaxmem.optim import adama

    return adama(1e-3, bits=8)


def update_error(steps: int = 8, rows: int = 64, columns: int = 256) -> float:
    """By how much parameters move otherwise with moments in 8 bits, relative (RMS).

    After some steps with normal gradients, whose scales lie over four decades from row
    to row.
    """
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), steps + 1)
    scale = 10.0 ** jax.random.uniform(keys[0], (rows, 1), minval=-4.0, maxval=0.0)

    def moved(tx: optax.GradientTransformation) -> jax.Array:
        params: Any = jnp.zeros((rows, columns), jnp.float32)
        state = tx.init(params)
        for key in keys[1:]:
            grads = scale * jax.random.normal(key, params.shape, jnp.float32)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    exact, low = moved(optax.adam(1e-3)), moved(low_bit_adam())
    return float(jnp.sqrt(jnp.mean((low - exact) ** 2) / jnp.mean(exact**2)))
