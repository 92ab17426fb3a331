"""The arrays of a call by name, and those that cannot be donated."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from jaxmem.frameworks._form import Form
from jaxmem.frameworks._places import Place
from jaxmem.ir import jaxprs

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def check_donated(
    fn: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], form: Form
) -> None:
    """ValueError where an array is donated, and is another argument as well.

    Args:
      fn: the function that is called, whose parameters give the names.
      args: positional arguments of the pure function.
      kwargs: its keyword arguments.
      form: of the call.
    """
    if not form.donated:
        return
    leaves = jax.tree.leaves((args, dict(kwargs)))
    arrays = [id(x) for x in leaves if _has_buffer(x)]
    if len({*arrays}) == len(arrays):
        return
    static = {place for place, _ in form.static}
    seen: dict[int, tuple[Place, str]] = {}
    for place, name, x in named_leaves(fn, args, kwargs, static):
        if not _has_buffer(x):
            continue
        first, other = seen.setdefault(id(x), (place, name))
        if other != name and {first, place} & {*form.donated}:
            raise ValueError(_one_array(other, name, place))


def _has_buffer(x: Any) -> bool:
    return isinstance(x, jax.Array) and not jaxprs.is_abstract(x)


def _one_array(first: str, second: str, place: Place) -> str:
    whole = second.partition(".")[0].partition("[")[0] or str(place)
    return (
        f"{first} and {second} are one and the same array, and a donated one can be "
        f"given once: its buffer is gone then. Copy one before the call, as in {whole} "
        f"= jax.tree.map(jnp.copy, {whole}); what nnx.clone or dict() makes shares its "
        "arrays with the original"
    )


def named_leaves(
    fn: Callable,  # the function whose parameters give the names
    args: Sequence[Any],  # positional arguments, without the static ones
    kwargs: Mapping[str, Any],
    static: Collection[Place] = (),  # places of those that were taken out
) -> Iterator[tuple[Place, str, Any]]:
    """(position or keyword, name, value) of each leaf of the arguments, in order."""
    titles = _titles(fn, len(args), static)
    for path, value in tree_flatten_with_path((tuple(args), dict(kwargs)))[0]:
        is_positional = path[0].idx == 0
        place = path[1].idx if is_positional else path[1].key
        title = titles[place] if is_positional else place
        # the path into an nnx object ends with the object's own dot
        yield place, title + keystr(path[2:]).removesuffix("."), value


def _titles(fn: Callable, given: int, static: Collection[Place]) -> list[str]:
    """Names of the positional arguments; `args[i]` where the signature has none."""
    count = given + sum(isinstance(place, int) for place in static)
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        parameters = []
    names = [p.name for p in parameters if p.kind in _POSITIONAL]
    names = [*names[:count], *(f"args[{i}]" for i in range(len(names), count))]
    return [name for i, name in enumerate(names) if i not in static]
