"""Arguments of a call by position or by name, as `jax.jit` resolves them."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

Place = int | str


def resolve(
    what: str,
    fn: Callable,
    places: Sequence[Place],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> frozenset[Place]:
    """The places in this call: positions from the front, and keywords."""
    # As in `jax.jit`, a position means the parameter there even if the call passes it
    # by name, and the other way round. A parameter with its default value has no place.
    names, is_open = _positional(fn)
    # jax counts from the back of the signature, or of the call if the signature has
    # *args
    total = len(args) if is_open else len(names)
    resolved: set[Place] = set()
    for place in places:
        counted = place + total if isinstance(place, int) and place < 0 else place
        here = _in_call(counted, names, len(args), kwargs)
        if here is not None:
            resolved.add(here)
        elif not (counted in names or counted in range(len(names))):
            kind = "argnames" if isinstance(place, str) else "argnums"
            raise ValueError(
                f"{what}_{kind}={place!r}: the call has {len(args)} positional "
                f"arguments and the keywords {sorted(kwargs)}"
            )
    return frozenset(resolved)


def _in_call(
    place: Place, names: list[str], count: int, kwargs: dict[str, Any]
) -> Place | None:
    if isinstance(place, int):
        if 0 <= place < count:
            return place
        name = names[place] if 0 <= place < len(names) else None
        return name if name in kwargs else None
    if place in kwargs:
        return place
    position = names.index(place) if place in names else count
    return position if position < count else None


def _positional(fn: Callable) -> tuple[list[str], bool]:
    """Names of the parameters that go by position, and whether there may be more."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return [], True  # a callable without a signature
    kind = inspect.Parameter
    both = (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD)
    is_open = any(p.kind is kind.VAR_POSITIONAL for p in parameters)
    return [p.name for p in parameters if p.kind in both], is_open
