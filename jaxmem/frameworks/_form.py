"""The pure side of a call: arrays in, the user's function, arrays out."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jaxmem.frameworks import _equinox, _nnx
from jaxmem.frameworks._closure import naming_closure
from jaxmem.frameworks._jitted import without_nnx_jit
from jaxmem.frameworks._places import Place
from jaxmem.frameworks._scopes import module_scopes
from jaxmem.frameworks._split_object import SplitObject, is_split


@dataclass(frozen=True)
class Form:
    """All of a call but its arrays; the same step and form give the same trace."""

    as_it_is: bool = True  # whether the pure arguments are those of the step itself
    # (place, value) of the static arguments, in the order of their places
    static: tuple[tuple[Place, Any], ...] = ()
    # Positions and keywords of the donated arguments, without the static ones
    donated: tuple[Place, ...] = ()
    objects: bool = False  # whether there are nnx objects among the arguments
    states: bool = False  # Variables of an `nnx.State` are objects, as in `nnx.jit`
    filtered: bool = False  # all but arrays is static, as in `equinox.filter_jit`

    def pure(self, fn: Callable) -> Callable:
        """`fn` as a function of the pure arguments, while the call is open."""
        return partial(_as_it_is if self.as_it_is else run, fn, self)


@dataclass(frozen=True)
class Updated:
    """The result of a pure step with nnx objects among its arguments."""

    updates: tuple[SplitObject, ...]  # the `SplitObject` of each object after the step
    out: Any  # the step's result, with a `SplitObject` in the place of each object


@jax.tree_util.register_static
@dataclass(frozen=True)
class Unchanged:
    """Stands for an array that the step has not changed, by the number of its input."""

    number: int


jax.tree_util.register_dataclass(
    Updated, data_fields=["updates", "out"], meta_fields=[]
)


def _as_it_is(fn: Callable, form: Form, *args: Any, **kwargs: Any) -> Any:
    with naming_closure(fn), module_scopes():
        return fn(*args, **kwargs)


def run(fn: Callable, form: Form, *args: Any, **kwargs: Any) -> Any:
    """The step as a function of its arrays; `Updated` if there are nnx objects."""
    given = args, kwargs
    objects = []

    def merged(x):
        value = merge(x) if is_split(x) else x
        objects.extend([value] if is_split_nnx(x) else [])
        return value

    with _merging(form, inner=True) as merge:
        args, kwargs = jax.tree.map(merged, given, is_leaf=is_split)
    args, kwargs = with_static(form.static, args, kwargs)
    with naming_closure(fn), module_scopes():
        out = without_nnx_jit(fn)(*args, **kwargs)
    with splitting(form) as split:
        updates = tuple(map(split, objects))
        out = split(out)
    if not form.objects:
        return out
    numbers = _numbers(form, given)
    mark = lambda x: Unchanged(numbers[id(x)]) if id(x) in numbers else x
    return Updated(tuple(_with_arrays(mark, update) for update in updates), out)


def give_back(form: Form, given: Any, out: Any) -> Any:
    """Updates the user's nnx objects and returns the step's result."""
    with _merging(form, inner=False) as merge:
        if form.objects:
            inputs = _object_arrays(given)
            restore = lambda x: inputs[x.number] if isinstance(x, Unchanged) else x
            for update in out.updates:
                merge(_with_arrays(restore, update))
            out = out.out
        return jax.tree.map(
            lambda x: merge(x) if is_split(x) else x, out, is_leaf=is_split
        )


@contextlib.contextmanager
def splitting(form: Form) -> Iterator[Callable[[Any], Any]]:
    """Gives a function that splits the objects and modules in a pytree."""
    with contextlib.ExitStack() as stack:
        split_object = None
        if form.objects:
            split_object = stack.enter_context(_nnx.splitting())

        def split(x):
            if _nnx.is_object(x) and split_object is not None:
                return split_object(x)
            return _equinox.split(x) if _equinox.is_module(x) else x

        def split_all(tree):
            if form.filtered:
                return _equinox.split(tree)
            return jax.tree.map(split, tree, is_leaf=leaf_of(form.states))

        yield split_all


def leaf_of(states: bool) -> Callable[[Any], bool]:
    """A predicate for what is split as a whole, or not split at all."""

    def is_leaf(x) -> bool:
        if _nnx.is_state(x):
            return not states
        return _nnx.is_object(x) or _equinox.is_module(x)

    return is_leaf


@contextlib.contextmanager
def _merging(form: Form, inner: bool) -> Iterator[Callable[[SplitObject], Any]]:
    """Gives the inverse of `splitting` for one `SplitObject`."""
    merge_module = lambda split: split.definition.merge(split.arrays)
    if not form.objects:
        yield merge_module
        return
    with _nnx.merging(inner) as merge_object:
        merge = lambda split: merge_object if is_split_nnx(split) else merge_module
        yield lambda split: merge(split)(split)


def is_split_nnx(x: Any) -> bool:
    """Whether this is a split nnx object."""
    return is_split(x) and isinstance(x.definition, _nnx.ObjectDefinition)


def with_static(static, args: Sequence[Any], kwargs: dict[str, Any]):
    """The arguments with the static ones in their places."""
    args, kwargs = list(args), dict(kwargs)
    for place, value in static:
        if isinstance(place, int):
            args.insert(place, value)
        else:
            kwargs[place] = value
    return tuple(args), kwargs


def _object_arrays(given: Any) -> list[Any]:
    objects = filter(is_split_nnx, jax.tree.leaves(given, is_leaf=is_split))
    return [x for split in objects for x in split.arrays]


def _numbers(form: Form, given: Any) -> dict[int, int]:
    """id of an object's array -> its number, if its buffer is not donated."""
    args, kwargs = given
    places = [*enumerate(args), *sorted(kwargs.items())]
    arrays = [(place, x) for place, arg in places for x in _object_arrays(arg)]
    return {
        id(x): i for i, (place, x) in enumerate(arrays) if place not in form.donated
    }


def _with_arrays(fn: Callable, split: SplitObject) -> SplitObject:
    return SplitObject(map(fn, split.arrays), split.names, split.definition)
