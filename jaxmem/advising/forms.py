"""What differs between frameworks: a model, the step of its loss, lines to write."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem.frameworks import is_equinox_module, is_nnx_object
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
    """Of a loss: its model where that is an nnx module, else the loss itself."""
    if is_nnx_model(args[0]):
        return lean_argument(loss_fn, args, 0, **options)
    lean, name = substitute(loss_fn, **options), name_of(loss_fn, "loss_fn")
    line = f"{name} = jaxmem.substitute({name}{_written(options)})"
    return Lean(lean, args, line, lambda: report(lean).replaced())


def lean_step(step: Callable, args: Args, **options: Any) -> Lean | None:
    """Of a step, the first argument with a model in it; None where there is none."""
    found = [i for i, x in enumerate(args) if is_nnx_model(x) or _apply_fn(x)]
    return lean_argument(step, args, found[0], **options) if found else None


def lean_argument(fn: Callable, args: Args, place: int, **options: Any) -> Lean:
    """The call with a lean nnx module, or with one in a TrainState."""
    name, given, words = parameters(fn, place + 1)[-1], args[place], _written(options)
    if is_nnx_model(given):
        model = new = substitute(given, **options)
        line = f"{name} = jaxmem.substitute({name}{words})"
    else:
        model = substitute(_apply_fn(given).__self__, **options)
        new = given.replace(apply_fn=model.apply)
        of = f"{name}.apply_fn.__self__{words}"
        line = f"{name} = {name}.replace(apply_fn=jaxmem.substitute({of}).apply)"
    args = *args[:place], new, *args[place + 1 :]
    return Lean(fn, args, line, lambda: report(model).replaced())


def is_nnx_model(x: Any) -> bool:
    """Whether it is an nnx module, and not an optimizer, metrics or keys."""
    if not is_nnx_object(x):
        return False
    from flax import nnx

    return isinstance(x, nnx.Module) and not isinstance(x, nnx.Optimizer | nnx.Metric)


def _apply_fn(x: Any) -> Any:
    """The `apply` of a linen module that Flax's TrainState has, or None."""
    from flax import linen

    fn = getattr(x, "apply_fn", None) if hasattr(x, "replace") else None
    return fn if isinstance(getattr(fn, "__self__", None), linen.Module) else None


def _written(options: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items())


def step_of(loss_fn: Callable, tx: optax.GradientTransformation) -> Callable:
    """A training step as one writes it, for a model of any framework."""

    def step(model, state, *args):
        if is_nnx_object(model):
            return _nnx_step(loss_fn, model, state, args)
        if is_equinox_module(model):
            return _equinox_step(loss_fn, tx, model, state, args)
        loss, grads = jax.value_and_grad(loss_fn)(model, *args)
        updates, state = tx.update(grads, state, model)
        return optax.apply_updates(model, updates), state, loss

    step.__name__ = getattr(loss_fn, "__name__", "loss_fn")
    return step


def _nnx_step(loss_fn: Callable, model: Any, optimizer: Any, args: Args) -> Any:
    from flax import nnx

    loss, grads = nnx.value_and_grad(loss_fn)(model, *args)
    optimizer.update(model, grads)
    return loss


def _equinox_step(loss_fn: Callable, tx: Any, model: Any, state: Any, args: Args):
    import equinox as eqx

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, *args)
    updates, state = tx.update(grads, state, _trained(model))
    return eqx.apply_updates(model, updates), state, loss


def step_args(tx: optax.GradientTransformation, args: Args) -> tuple:
    """(model, optimizer or its state, the loss's other arguments).

    All but the others are abstract; moments lie where their parameters do.
    """
    from jaxmem.optim import abstract_state

    model, *rest = args
    if is_nnx_object(model):
        model = _abstract_model(model)
        return model, _abstract_optimizer(model, tx), *rest
    abstract = jax.tree.map(lambda x: _struct(x) if hasattr(x, "dtype") else x, model)
    trained = _trained(abstract) if is_equinox_module(model) else abstract
    return abstract, abstract_state(tx, trained), *rest


def state_lines(loss_fn: Callable, args: Args) -> tuple[str, ...]:
    """The line that makes the state of another optimizer."""
    (name,) = parameters(loss_fn, 1)
    if is_nnx_object(args[0]):
        return (f"optimizer = flax.nnx.Optimizer({name}, tx, wrt=flax.nnx.Param)",)
    if is_equinox_module(args[0]):
        trained = f"equinox.filter({name}, equinox.is_inexact_array)"
        return (f"opt_state = tx.init({trained})",)
    return (f"opt_state = tx.init({name})",)


def _trained(model: Any) -> Any:
    """The arrays of an Equinox module that an optimizer updates."""
    import equinox as eqx

    is_float = lambda x: hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
    return eqx.filter(model, is_float)


def _abstract_model(model: Any) -> Any:
    from flax import nnx

    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(_struct, state))


def _abstract_optimizer(model: Any, tx: optax.GradientTransformation) -> Any:
    """The optimizer of an abstract model, with the memory of each array."""
    from flax import nnx

    from jaxmem.optim import abstract_state

    make = lambda model: nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer = nnx.eval_shape(make, model)
    placed = abstract_state(tx, nnx.state(model, nnx.Param))
    is_variable = lambda x: isinstance(x, nnx.Variable)
    found = jax.tree.leaves(optimizer.opt_state, is_leaf=is_variable)
    for variable, x in zip(found, jax.tree.leaves(placed), strict=True):
        variable.set_value(x)
    return optimizer


def _struct(x) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
