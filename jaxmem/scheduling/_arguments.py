"""Positions and names of arguments, their leaves, and `jax.jit` with both."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmem import _jaxpr


def jit_with(fn: Callable, donated: Sequence, static: Sequence, options=None):
    """`jax.jit` with places that are positions or names; `options` of the compiler."""

    def split(places) -> tuple[list[int] | None, list[str] | None]:
        numbers = [p for p in places if isinstance(p, int)]
        # None lets jit find positions by names and names by positions
        return numbers or None, [p for p in places if isinstance(p, str)] or None

    (donate_argnums, donate_argnames), (static_argnums, static_argnames) = map(
        split, (donated, static)
    )
    return jax.jit(
        fn,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        compiler_options=options,
    )


def abstract(arguments: Any, static: Sequence) -> Any:
    """Shapes and dtypes of all that is not static, Python scalars included."""
    count = len(arguments)
    static = [p + count if isinstance(p, int) and p < 0 else p for p in static]
    items = arguments.items() if isinstance(arguments, dict) else enumerate(arguments)
    made = {k: v if k in static else jax.tree.map(_aval, v) for k, v in items}
    return made if isinstance(arguments, dict) else tuple(made.values())


def _aval(leaf):
    if isinstance(leaf, bool | int | float | complex):
        return jax.eval_shape(lambda x: x, leaf)
    if _jaxpr.is_abstract(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def kind(leaf):
    """What the choice for an argument depends on."""
    if not _jaxpr.is_array(leaf):
        return leaf
    return leaf.shape, str(leaf.dtype), getattr(leaf, "sharding", None)


def positions(args, kwargs, places: Sequence) -> list[int]:
    """Which of the array leaves belong to these arguments."""
    found, count = [], 0
    for place, value in [*enumerate(args), *sorted(kwargs.items())]:
        leaves = [x for x in jax.tree.leaves(value) if _jaxpr.is_array(x)]
        if place in places or (isinstance(place, int) and place - len(args) in places):
            found += range(count, count + len(leaves))
        count += len(leaves)
    return found
