"""The pure side of a call: arrays in, the user's function, arrays out."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.frameworks._closure import naming_closure
from jaxmem.frameworks._places import Place
from jaxmem.frameworks._scopes import module_scopes
from jaxmem.frameworks._split_object import SplitObject, is_split
from jaxmem.frameworks.framework import Framework
from jaxmem.frameworks.registry import in_use, owner_of


@dataclass(frozen=True)
class Form:
    """All of a call but its arrays; the same step and form give the same trace."""

    as_it_is: bool = True  # whether the pure arguments are those of the step itself
    # (place, value) of the static arguments, in the order of their places
    static: tuple[tuple[Place, Any], ...] = ()
    # Positions and keywords of the donated arguments, without the static ones
    donated: tuple[Place, ...] = ()
    # Those with objects among the arguments that a step updates in place
    objects: tuple[Framework, ...] = ()
    compiler: Framework | None = None  # whose own `jit` made the step

    def pure(self, fn: Callable) -> Callable:
        """`fn` as a function of the pure arguments, while the call is open."""
        return partial(_as_it_is if self.as_it_is else run, fn, self)


@dataclass(frozen=True)
class Updated:
    """The result of a pure step with objects among its arguments that it updates."""

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
        return _compat.without_compiler_options(fn)(*args, **kwargs)


def run(fn: Callable, form: Form, *args: Any, **kwargs: Any) -> Any:
    """The step as a function of its arrays; `Updated` if it updates objects."""
    given = args, kwargs
    objects = []

    def merged(x):
        value = merge(x) if is_split(x) else x
        objects.extend([value] if is_split_object(x) else [])
        return value

    with _merging(form, inner=True) as merge:
        args, kwargs = jax.tree.map(merged, given, is_leaf=is_split)
    args, kwargs = with_static(form.static, args, kwargs)
    with naming_closure(fn), module_scopes():
        compiler = form.compiler
        without = compiler.without_jit if compiler else _compat.without_compiler_options
        inner = without(fn)
        out = inner(*args, **kwargs)
    with splitting(form) as split:
        updates = tuple(map(split, objects))
        out = split(out)
    if not form.objects:
        return out
    numbers = _numbers(form, given)
    mark = lambda x: Unchanged(numbers[id(x)]) if id(x) in numbers else x
    return Updated(tuple(_with_arrays(mark, update) for update in updates), out)


def give_back(form: Form, given: Any, out: Any) -> Any:
    """Updates the user's objects and returns the step's result."""
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
        splits = {f: stack.enter_context(f.splitting()) for f in _taking_part(form)}

        def split(x):
            owner = owner_of(x)
            return splits[owner](x) if owner in splits else x

        def split_all(tree):
            if form.compiler is not None and form.compiler.static_leaves:
                return form.compiler.split(tree)
            return jax.tree.map(split, tree, is_leaf=leaf_of(form.compiler))

        yield split_all


def _taking_part(form: Form) -> list[Framework]:
    """Modules may be made in the step; an object needs one that it is updated from."""
    return [f for f in in_use() if not f.in_place or f in form.objects]


def leaf_of(compiler: Framework | None) -> Callable[[Any], bool]:
    """A predicate for what is split as a whole, or not split at all."""
    frameworks = in_use()

    def is_leaf(x) -> bool:
        whole = next((f for f in frameworks if f.leaves_whole(x)), None)
        if whole is not None:
            return whole is not compiler
        return any(f.owns(x) for f in frameworks)

    return is_leaf


@contextlib.contextmanager
def _merging(form: Form, inner: bool) -> Iterator[Callable[[SplitObject], Any]]:
    """Gives the inverse of `splitting` for one `SplitObject`."""
    with contextlib.ExitStack() as stack:
        taking_part = _taking_part(form)
        merges = {f: stack.enter_context(f.merging(inner)) for f in taking_part}
        yield lambda split: merges[split.owner](split)


def is_split_object(x: Any) -> bool:
    """Whether this is split from an object that a step updates in place."""
    return is_split(x) and x.owner.in_place


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
    objects = filter(is_split_object, jax.tree.leaves(given, is_leaf=is_split))
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
    return split.replace(map(fn, split.arrays))
