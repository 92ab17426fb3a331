"""Positions and names of arguments, their leaves, and `jax.jit` with both."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmem.frameworks import Place
from jaxmem.ir import jaxprs


def jit_with(fn: Callable, donated: Sequence[Place], options=None, shardings=()):
    """`jax.jit` with donated positions and names; `options` of the compiler."""
    # `shardings`: trees for arguments and results, None where there are none.
    names = ("in_shardings", "out_shardings")
    named = {k: s for k, s in zip(names, shardings, strict=False) if s is not None}
    return jax.jit(
        fn,
        **named,
        donate_argnums=[p for p in donated if isinstance(p, int)],
        donate_argnames=[p for p in donated if isinstance(p, str)],
        compiler_options=options,
    )


def abstract(arguments: Any) -> Any:
    """Shapes and dtypes of all leaves, Python scalars included."""
    return jax.tree.map(_aval, arguments)


def _aval(leaf):
    if isinstance(leaf, bool | int | float | complex):
        return jax.eval_shape(lambda x: x, leaf)
    if jaxprs.is_abstract(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def positions(args, kwargs, places: Sequence) -> list[int]:
    """Which of the array leaves belong to these arguments."""
    found, count = [], 0
    for place, value in [*enumerate(args), *sorted(kwargs.items())]:
        leaves = [x for x in jax.tree.leaves(value) if jaxprs.is_array(x)]
        if place in places or (isinstance(place, int) and place - len(args) in places):
            found += range(count, count + len(leaves))
        count += len(leaves)
    return found


def check_fixed_sizes(what: str, arguments: Any) -> None:
    """ValueError for a shape of `jax.export` whose sizes are not known."""
    for path, leaf in jax.tree.leaves_with_path(arguments):
        shape = getattr(leaf, "shape", ())
        if not all(isinstance(d, int) for d in shape):
            raise ValueError(
                f"{what}: argument {jax.tree_util.keystr(path)} has the symbolic shape "
                f"{shape}, and bytes take numbers: pass an array of the size that is "
                "meant"
            )
