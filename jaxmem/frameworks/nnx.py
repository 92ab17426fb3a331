"""Flax nnx: objects are split at the call, merged in the trace, updated after it.

This uses the contexts of `nnx.jit`, which keep track of Variables that arguments share,
of new attributes, and of objects that the step returns.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax.tree_util import DictKey, tree_flatten_with_path

from jaxmem._paths import path_of
from jaxmem.frameworks._jitted import Jitted, of_jax
from jaxmem.frameworks._split_object import SplitObject
from jaxmem.frameworks.framework import Framework
from jaxmem.frameworks.training import (
    OVERWRITE,
    Held,
    ModelUpdate,
    Path,
    StepForm,
    Wanted,
    next_step,
)

_TAG = "jaxmem"  # names the context that split, step and merge share


@dataclass(frozen=True)
class ObjectDefinition:
    """All of an nnx object but its arrays."""

    graphdef: Any  # its definition, as `nnx.split` returns it
    structure: Any  # that of its state


@dataclass(frozen=True)
class Paths:
    """An nnx filter: the Variables at these paths."""

    paths: frozenset[Path]

    def __call__(self, path: Sequence[Any], value: Any) -> bool:
        return tuple(path) in self.paths


class Nnx(Framework):
    """A step updates its objects: `(model, optimizer, batch, rng) -> metrics`."""

    name: ClassVar[str] = "nnx"
    module: ClassVar[str | None] = "flax.nnx"
    in_place: ClassVar[bool] = True
    lean_layers: ClassVar[bool] = True
    state_name: ClassVar[str] = "optimizer"

    # -- objects among the arguments of a step

    def owns(self, x: Any) -> bool:
        # An `nnx.State` is a pytree for functional steps, which return it.
        nnx = sys.modules["flax.nnx"]
        return isinstance(x, nnx.Pytree | nnx.Variable)

    def leaves_whole(self, x: Any) -> bool:
        """A state or a definition that `nnx.split` returns."""
        nnx = sys.modules["flax.nnx"]
        return isinstance(x, nnx.State | nnx.GraphDef)

    def carried(self) -> contextlib.AbstractContextManager[Any]:
        from flax import nnx

        return nnx.update_context(_TAG)

    @contextlib.contextmanager
    def splitting(self) -> Iterator[Callable]:
        # A Variable that several objects share is in the first of them.
        from flax import nnx

        with nnx.split_context(_TAG) as context:

            def split(node: Any) -> SplitObject:
                graphdef, state = context.split(node)
                leaves, structure = tree_flatten_with_path(state)
                names = [_name(path) for path, _ in leaves]
                definition = ObjectDefinition(graphdef, structure)
                return SplitObject([x for _, x in leaves], names, definition, self)

            yield split

    @contextlib.contextmanager
    def merging(self, inner: bool) -> Iterator[Callable]:
        from flax import nnx

        with nnx.merge_context(_TAG, inner) as context:

            def merge(split: SplitObject) -> Any:
                definition = split.definition
                state = jax.tree.unflatten(definition.structure, split.arrays)
                return context.merge(definition.graphdef, state)

            yield merge

    def map_arrays(self, fn: Callable, x: Any) -> Any:
        from flax import nnx

        graphdef, state = nnx.split(x)
        return nnx.merge(graphdef, jax.tree.map(fn, state))

    # -- its own `jit`

    def compiles(self, fn: Callable) -> bool:
        return hasattr(fn, "jitted_fn")

    def jit_options(self, fn: Any) -> Jitted | None:
        return of_jax(fn.jitted_fn)

    def without_jit(self, fn: Any) -> Callable:
        # Objects are split and merged by the call already, and an array that the step
        # does not change need not be an output. A step that names shardings stays as it
        # is: nnx derives from them the sharding of each array of an object.
        names = ("in_shardings", "out_shardings")
        sharded = any(getattr(fn, name, None) is not None for name in names)
        return fn if sharded else fn.__wrapped__

    # -- modules

    def module_class(self) -> type:
        from flax import nnx

        return nnx.Module

    def parts(self, x: Any) -> Iterator[tuple[Path, Any]]:
        from flax import nnx

        return nnx.iter_graph(x)

    def is_lost_update(self, error: Exception) -> bool:
        # A class of its own where a Variable is set, and a ValueError where a
        # transformation such as `nnx.grad` would carry it.
        return "different trace level" in str(error)

    # -- training

    def select(self, model: Any, wanted: Wanted) -> tuple[Any, Any, Any]:
        """Two states of arrays, without Variables: as optax has them."""
        from flax import nnx

        chosen = (path for path, x in self.variables(model) if wanted(path, x))
        graph, *states = nnx.split(model, Paths(frozenset(chosen)), ...)
        mine, others = nnx.as_pure(tuple(states))
        return mine, others, graph

    def combine(self, chosen: Any, others: Any, rest: Any = None) -> Any:
        from flax import nnx

        return nnx.merge(rest, chosen, others)

    def variables(self, model: Any) -> Sequence[tuple[Path, Any]]:
        from flax import nnx

        return list(nnx.to_flat_state(nnx.state(model)))

    def arrays(self, x: Any) -> Iterator[tuple[Path, Any]]:
        """Without the Variables, of which one may be an object by itself."""
        from flax import nnx

        held = [((), x)] if isinstance(x, nnx.Variable) else self.variables(x)
        for path, value in held:
            is_variable = isinstance(value, nnx.Variable)
            for keys, leaf in jax.tree.leaves_with_path(value):
                inner = path_of(keys[is_variable:])
                yield (*path, *filter(None, [inner])), leaf

    def predicate(self, mask: Any) -> Wanted:
        """Any nnx filter."""
        from flax import nnx

        wanted: Callable = nnx.filterlib.to_predicate(mask)
        return wanted

    def filter_of(self, trained: Any) -> Callable[..., bool]:
        """`nnx.Optimizer(..., wrt=)`."""
        return Paths(_paths_of(trained))

    def parameters(self, model: Any) -> Any:
        from flax import nnx

        return nnx.state(model, nnx.Param)

    def step_form(
        self, update: ModelUpdate, tx: Any, has_model_state: bool
    ) -> StepForm:
        """The Variables that the optimizer does not train are the model state."""
        # batch statistics, counters of random streams, frozen parameters
        from flax import nnx

        if has_model_state:
            raise ValueError(
                "has_model_state=True with an nnx.Module, which holds its own: leave "
                "it out"
            )

        def microbatch_step(model, optimizer, batch, rng=None):
            _check_optimizer(tx, optimizer)
            _check_overwritten(model)
            graph, *states = nnx.split(model, optimizer.wrt, ...)
            params, rest = nnx.as_pure(states)
            opt_state, step = nnx.as_pure((optimizer.opt_state, optimizer.step))
            held = Held(params, functools.partial(nnx.merge, graph), rest, _rest_of)
            out = update(held, opt_state, None, batch, rng)
            nnx.update(model, out.params, out.model_state)
            nnx.update(optimizer.opt_state, nnx.state(out.opt_state))
            optimizer.step.set_value(next_step(step, out.updated))
            return out.metrics

        def state(args, out=None):
            return nnx.as_pure(args[1].opt_state)

        check = lambda args: _check_optimizer(tx, args[1])
        return StepForm(microbatch_step, (0, 1), state, state, check)

    def train_step(self, loss_fn, tx, model, state, args) -> Any:
        from flax import nnx

        loss, grads = nnx.value_and_grad(loss_fn)(model, *args)
        state.update(model, grads)
        return loss

    def takes_apart(self, params: Any) -> bool:
        """`nnx.Optimizer.update` does."""
        return isinstance(params, sys.modules["flax.nnx"].State)

    def by_keys(self, x: Any) -> Any:
        from flax import nnx

        return nnx.state(x)

    def abstract_state(self, model: Any, tx: Any, init: Callable) -> Any:
        """The `nnx.Optimizer`, with the memory of each array."""
        from flax import nnx

        make = lambda model: nnx.Optimizer(model, tx, wrt=nnx.Param)
        optimizer = nnx.eval_shape(make, model)
        placed = init(tx, self.parameters(model))
        is_variable = lambda x: isinstance(x, nnx.Variable)
        found = jax.tree.leaves(optimizer.opt_state, is_leaf=is_variable)
        for variable, x in zip(found, jax.tree.leaves(placed), strict=True):
            variable.set_value(x)
        return optimizer

    def state_line(self, name: str) -> str:
        return f"optimizer = flax.nnx.Optimizer({name}, tx, wrt=flax.nnx.Param)"

    # -- substitution

    def is_model(self, x: Any) -> bool:
        """A module, and not an optimizer, metrics or keys."""
        return isinstance(x, sys.modules["flax.nnx"].Module)


def _name(path) -> str:
    """The path in a state as people write it: `layers[0].kernel`."""
    keys = [key.key for key in path if isinstance(key, DictKey)]
    text = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return "".join(text).removeprefix(".")


def _paths_of(state: Any) -> frozenset[Path]:
    from flax import nnx

    return frozenset(path for path, _ in nnx.to_flat_state(state))


def _rest_of(model: Any, params: Any) -> Any:
    """The state of a model beside these parameters."""
    from flax import nnx

    _, rest = nnx.split_state(nnx.state(model), Paths(_paths_of(params)), ...)
    return nnx.as_pure(rest)


def _check_optimizer(tx: Any, optimizer: Any) -> None:
    from flax import nnx

    if not isinstance(optimizer, nnx.Optimizer):
        raise TypeError(
            "the second argument after an nnx.Module is its nnx.Optimizer, got "
            f"{type(optimizer).__name__}"
        )
    if optimizer.tx != tx:
        raise ValueError(
            "tx is not the nnx.Optimizer's own transformation: pass "
            "microbatch(loss_fn, optimizer.tx, n)"
        )


def _check_overwritten(model: Any) -> None:
    """ValueError for a state that `nnx.Optimizer` leaves alone."""
    from flax import nnx

    for path, variable in nnx.to_flat_state(nnx.state(model)):
        kind = getattr(variable, "type", type(variable))
        if kind.__name__ == OVERWRITE or hasattr(kind, OVERWRITE):
            raise ValueError(
                f"the model's {'/'.join(map(str, path))} is of {kind.__name__!r}: its "
                "gradient would have to overwrite it, which an nnx.Optimizer does not "
                "do; train the linen model with a TrainState, or without such a state"
            )
