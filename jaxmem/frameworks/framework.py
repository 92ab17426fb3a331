"""`Framework`: all that this library asks of a framework.

A framework is a subclass in one file, of which `register` takes an instance. Three
methods are enough: `owns`, `split` and `merge`; the others follow from these, or say
that there is nothing of the kind. `Pytrees` has what frameworks share whose models are
pytrees.

Methods are called only while the framework's module is imported, so they import it
where they need it, and nobody else does.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import optax

from jaxmem._paths import has_gradient
from jaxmem.frameworks._jitted import Jitted, of_jax
from jaxmem.frameworks._split_object import SplitObject
from jaxmem.frameworks.training import (
    Held,
    ModelUpdate,
    Path,
    StepForm,
    Wanted,
    functional_form,
)


class Framework:
    """A framework whose models are objects that JAX does not look into.

    Attributes:
      name: by which others know it.
      module: the name in `sys.modules` without which none of its objects exists; None
        where it is known by its attributes alone.
      in_place: whether a step updates its objects, and need not return them.
      is_pytree: whether its models are pytrees of arrays.
      static_leaves: whether its `jit` takes as static all that is no array.
      lean_layers: whether `jaxmem.substitute` gives back a model, whose layers are
        others, and not a function.
      state_name: what lines call the optimizer's state, the second argument of a step.
    """

    name: ClassVar[str]
    module: ClassVar[str | None]
    in_place: ClassVar[bool] = False
    is_pytree: ClassVar[bool] = False
    static_leaves: ClassVar[bool] = False
    lean_layers: ClassVar[bool] = False
    state_name: ClassVar[str] = "opt_state"

    # -- objects among the arguments of a step

    def owns(self, x: Any) -> bool:
        """Whether `x` is split into arrays, which are traced, and the rest."""
        raise NotImplementedError

    def split(self, x: Any) -> SplitObject:
        """The arrays of an object, and the rest, which compares and has a hash."""
        raise NotImplementedError

    def merge(self, split: SplitObject) -> Any:
        """The inverse of `split`."""
        raise NotImplementedError

    def leaves_whole(self, x: Any) -> bool:
        """Whether `x` is a pytree that stays one, unless its own `jit` is called."""
        del x
        return False

    def carried(self) -> contextlib.AbstractContextManager[Any]:
        """The context of a call: of splitting, the step and merging."""
        return contextlib.nullcontext()

    def splitting(self) -> contextlib.AbstractContextManager[Callable]:
        """Gives `split` for all objects of a call together."""
        return contextlib.nullcontext(self.split)

    def merging(self, inner: bool) -> contextlib.AbstractContextManager[Callable]:
        """Gives `merge` likewise; `inner`: in a trace, where objects are new."""
        del inner
        return contextlib.nullcontext(self.merge)

    def map_arrays(self, fn: Callable, x: Any) -> Any:
        """A copy of an object (if `in_place`, of a pytree of them) with new arrays."""
        split = self.split(x)
        return self.merge(split.replace(map(fn, split.arrays)))

    # -- its own `jit`

    def compiles(self, fn: Callable) -> bool:
        """Whether its `jit` made `fn`."""
        del fn
        return False

    def jit_options(self, fn: Callable) -> Jitted | None:
        """The options of a function that it `compiles`."""
        return of_jax(fn)

    def without_jit(self, fn: Callable) -> Callable:
        """What is traced instead of a function that it `compiles`."""
        return fn

    # -- modules

    def module_class(self) -> type | None:
        """The class of modules whose calls are to be in name scopes of their paths."""
        return None

    def parts(self, x: Any) -> Iterator[tuple[Path, Any]]:
        """(path, object) of an object and all that it holds."""
        yield (), x

    def is_lost_update(self, error: Exception) -> bool:
        """Whether it raises this where an object of another trace is updated."""
        del error
        return False

    # -- training

    def trains(self, x: Any) -> bool:
        """Whether `x`, the first argument of a step, tells how the step is called."""
        return self.owns(x)

    def select(self, model: Any, wanted: Wanted) -> tuple[Any, Any, Any]:
        """(wanted arrays, the others, the rest); the rest compares and has a hash."""
        split = self.split(model)
        found = self.variables(model)
        chosen, others = (
            {_key(path): x for path, x in found if wanted(path, x) is want}
            for want in (True, False)
        )
        return chosen, others, (split.names, split.definition)

    def combine(self, chosen: Any, others: Any, rest: Any = None) -> Any:
        """The inverse of `select`."""
        names, definition = rest
        arrays = chosen | others
        both = (arrays[_key(_path(name))] for name in names)
        return self.merge(SplitObject(both, names, definition, self))

    def variables(self, model: Any) -> Sequence[tuple[Path, Any]]:
        """(path, array) of a model whose paths are not those of a pytree."""
        split = self.split(model)
        return list(zip(map(_path, split.names), split.arrays, strict=True))

    def arrays(self, x: Any) -> Iterator[tuple[Path, Any]]:
        """(path, array) of all arrays of an object that it owns."""
        yield from self.variables(x)

    def predicate(self, mask: Any) -> Wanted:
        """A mask of its own kind; TypeError or ValueError for any other."""
        raise TypeError(f"{mask!r} is no mask of {self.name}")

    def filter_of(self, trained: Any) -> Callable[..., bool] | None:
        """What its own optimizer takes to train these arrays alone."""
        del trained
        return None

    def partition(self, model: Any) -> tuple[Any, Any, Any]:
        """`select` of what an optimizer trains."""
        return self.select(model, lambda path, x: has_gradient(x))

    def parameters(self, model: Any) -> Any:
        """The pytree that an optimizer is made for."""
        return self.partition(model)[0]

    def step_form(
        self, update: ModelUpdate, tx: Any, has_model_state: bool
    ) -> StepForm:
        """The step of `jaxmem.microbatch` as its users call it."""
        del tx
        return functional_form(self._held, update, has_model_state)

    def _held(self, model: Any) -> Held:
        trained, others, rest = self.partition(model)
        return Held(trained, lambda params: self.combine(params, others, rest))

    def train_step(self, loss_fn, tx, model, state, args) -> Any:
        """A step as its users write it, once."""
        trained, others, rest = self.partition(model)

        def loss_of(trained):
            return loss_fn(self.combine(trained, others, rest), *args)

        loss, grads = jax.value_and_grad(loss_of)(trained)
        updates, state = tx.update(grads, state, trained)
        new = optax.apply_updates(trained, updates)
        return self.combine(new, others, rest), state, loss

    def takes_apart(self, params: Any) -> bool:
        """Whether optimizer states of such parameters are held by keys alone."""
        return False

    def by_keys(self, x: Any) -> Any:
        """What a tuple in such a state is after an update."""
        raise NotImplementedError

    def abstract_state(self, model: Any, tx: Any, init: Callable) -> Any:
        """The optimizer's state of an abstract model; `init(tx, parameters)`."""
        return init(tx, self.parameters(model))

    def state_line(self, name: str) -> str:
        """The line that makes that state for the model `name`."""
        return f"{self.state_name} = tx.init({name})"

    # -- substitution

    def is_model(self, x: Any) -> bool:
        """Whether `jaxmem.substitute` takes it."""
        return self.owns(x) and callable(x)

    def forward(self, model: Any) -> Callable:
        """The function that computes the model."""
        return model

    def with_forward(self, model: Any, fn: Callable) -> Any:
        """What takes the model's place when its function is another."""
        del model
        return fn

    def exchanged(self, model: Any, change: Callable[[str, Any], Any | None]) -> Any:
        """The model with `change(path, module)` instead of each module.

        Where that is None the module stays, and those inside of it are asked for.
        """
        del change
        return model

    def model_in(self, x: Any) -> Any | None:
        """The model with `lean_layers` that is or is in an argument of a step."""
        return x if self.lean_layers and self.is_model(x) else None

    def with_model(self, x: Any, model: Any) -> Any:
        """The argument with another model."""
        del x
        return model

    def substitute_line(self, name: str, options: str) -> str:
        """The line that substitutes the model in the argument `name`."""
        return f"{name} = jaxmem.substitute({name}{options})"


def _path(name: str) -> Path:
    """Of an array's name in a `SplitObject`, as "layers[0].kernel"."""
    return tuple(re.findall(r"[^.\[\]'\"/]+", name))


def _key(path: Path) -> str:
    return "/".join(path)
