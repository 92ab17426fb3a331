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
from jaxmem.frameworks._parts import Parts, is_parts
from jaxmem.frameworks._places import Place


@dataclass(frozen=True)
class Form:
    """What a call is apart from its arrays; the same step and form trace the same.

    Attributes:
      as_it_is: whether the arguments are those of the step, nothing taken out.
      static: (place, value) of the static arguments, in the order of their places.
      donated: positions and keywords of what is left whose buffers are given up.
      objects: whether there are nnx objects among the arguments.
      states: whether Variables of an `nnx.State` are such too, as in `nnx.jit`.
      filtered: whether all that is no array is static, as in `equinox.filter_jit`.
    """

    as_it_is: bool = True
    static: tuple[tuple[Place, Any], ...] = ()
    donated: tuple[Place, ...] = ()
    objects: bool = False
    states: bool = False
    filtered: bool = False

    def pure(self, fn: Callable) -> Callable:
        """`fn` as a function of the pure arguments, while the call is open."""
        return partial(_as_it_is if self.as_it_is else run, fn, self)


@dataclass(frozen=True)
class Updated:
    """What a pure step returns that was given nnx objects.

    Attributes:
      updates: the `Parts` of each object, as the step has left it.
      out: the step's result, with `Parts` in the place of objects.
    """

    updates: tuple[Parts, ...]
    out: Any


@jax.tree_util.register_static
@dataclass(frozen=True)
class Unchanged:
    """In the place of an array that the step has left as it was: the input's number."""

    number: int


jax.tree_util.register_dataclass(
    Updated, data_fields=["updates", "out"], meta_fields=[]
)


def _as_it_is(fn: Callable, form: Form, *args: Any, **kwargs: Any) -> Any:
    with naming_closure(fn):
        return fn(*args, **kwargs)


def run(fn: Callable, form: Form, *args: Any, **kwargs: Any) -> Any:
    """The step as a function of its arrays.

    Returns:
      The step's result; `Updated` where there are nnx objects among the arguments.
    """
    given = args, kwargs
    objects = []

    def whole(x):
        found = merge(x) if is_parts(x) else x
        objects.extend([found] if is_graph(x) else [])
        return found

    with _merging(form, inner=True) as merge:
        args, kwargs = jax.tree.map(whole, given, is_leaf=is_parts)
    args, kwargs = with_static(form.static, args, kwargs)
    with naming_closure(fn):
        out = without_nnx_jit(fn)(*args, **kwargs)
    with splitting(form) as split:
        updates = tuple(map(split, objects))
        out = split(out)
    if not form.objects:
        return out
    numbers = _numbers(form, given)
    return Updated(tuple(_without_unchanged(p, numbers) for p in updates), out)


def give_back(form: Form, given: Any, out: Any) -> Any:
    """Updates the user's nnx objects and returns the step's result.

    Args:
      form: of the call.
      given: the arguments of the pure function.
      out: what it has returned.
    """
    with _merging(form, inner=False) as merge:
        if form.objects:
            leaves = _object_leaves(given)
            for parts in out.updates:
                merge(_with_unchanged(parts, leaves))
            out = out.out
        return jax.tree.map(
            lambda x: merge(x) if is_parts(x) else x, out, is_leaf=is_parts
        )


@contextlib.contextmanager
def splitting(form: Form) -> Iterator[Callable[[Any], Any]]:
    """Gives a function from a pytree to one with `Parts` for objects and modules."""
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
    """Tells what is taken apart as a whole, or left as a whole."""

    def is_leaf(x) -> bool:
        if _nnx.is_state(x):
            return not states
        return _nnx.is_object(x) or _equinox.is_module(x)

    return is_leaf


@contextlib.contextmanager
def _merging(form: Form, inner: bool) -> Iterator[Callable[[Parts], Any]]:
    """Gives the inverse of `splitting` for one `Parts`."""
    if not form.objects:
        yield lambda parts: parts.recipe.merge(parts.leaves)
        return
    with _nnx.merging(inner) as merge:
        yield (
            lambda parts: (
                merge(parts) if is_graph(parts) else parts.recipe.merge(parts.leaves)
            )
        )


def is_graph(x: Any) -> bool:
    """Whether these are the parts of an nnx object."""
    return is_parts(x) and isinstance(x.recipe, _nnx.Graph)


def with_static(static, args: Sequence[Any], kwargs: dict[str, Any]):
    """The arguments with the static ones in their places."""
    args, kwargs = list(args), dict(kwargs)
    for place, value in static:
        if isinstance(place, int):
            args.insert(place, value)
        else:
            kwargs[place] = value
    return tuple(args), kwargs


def _object_leaves(given: Any) -> list[Any]:
    parts = filter(is_graph, jax.tree.leaves(given, is_leaf=is_parts))
    return [x for p in parts for x in p.leaves]


def _numbers(form: Form, given: Any) -> dict[int, int]:
    """id of an object's array -> its number, where its buffer stays the caller's."""
    args, kwargs = given
    places = [*enumerate(args), *sorted(kwargs.items())]
    leaves = [(place, x) for place, arg in places for x in _object_leaves(arg)]
    return {
        id(x): i for i, (place, x) in enumerate(leaves) if place not in form.donated
    }


def _without_unchanged(parts: Parts, numbers: dict[int, int]) -> Parts:
    leaves = (
        Unchanged(numbers[id(x)]) if id(x) in numbers else x for x in parts.leaves
    )
    return Parts(tuple(leaves), parts.names, parts.recipe)


def _with_unchanged(parts: Parts, leaves: Sequence[Any]) -> Parts:
    restored = (
        leaves[x.number] if isinstance(x, Unchanged) else x for x in parts.leaves
    )
    return Parts(tuple(restored), parts.names, parts.recipe)
