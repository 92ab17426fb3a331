"""Positions and names of arguments, their leaves, and `jax.jit` with both."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmem.frameworks import Place
from jaxmem.ir import jaxprs
from jaxmem.ir.flatten import typed_sharding
from jaxmem.ir.graph import across_memories
from jaxmem.ir.scans import is_on_host


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
        # it has a weak type, as under `jit`
        return jax.eval_shape(lambda x: x, leaf)
    if jaxprs.is_abstract(leaf):
        # on explicit axes its type says how it is sharded
        where = typed_sharding(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
    return leaf


def positions(args, kwargs, places: Sequence) -> list[int]:
    """Which of the array leaves belong to these arguments."""
    found, count = [], 0
    # `jax.tree.flatten` goes through a dictionary in the order of its keys
    for place, value in [*enumerate(args), *sorted(kwargs.items())]:
        leaves = [x for x in jax.tree.leaves(value) if jaxprs.is_array(x)]
        # positions may be counted from the end
        if place in places or (isinstance(place, int) and place - len(args) in places):
            found += range(count, count + len(leaves))
        count += len(leaves)
    return found


def on_one_device(arguments: Any) -> bool:
    """Whether no array of them is known to lie on several devices."""
    places = (getattr(x, "sharding", None) for x in jax.tree.leaves(arguments))
    return all(place is None or place.num_devices == 1 for place in places)


def check_memories(closed, given: Sequence[int], arguments: Any) -> None:
    """ValueError if `jit` on one device reuses an argument across memories.

    Args:
      closed: the step's jaxpr.
      given: which of its inputs are donated.
      arguments: of the step, to name one.
    """
    paths = [p for p, x in jax.tree.leaves_with_path(arguments) if jaxprs.is_array(x)]
    for output, i in across_memories(closed, given).items():
        memories = ("device", "pinned_host")
        there = is_on_host(closed.jaxpr.invars[i])
        path, own, other = paths[i], memories[there], memories[not there]
        raise ValueError(
            f"argument {jax.tree_util.keystr(path[1:])} is donated and lies in {own}, "
            f"but `jax.jit` would put result {output}, an array of the same shape and "
            f"dtype in {other}, into its buffer, and the process would abort: donate "
            "the parameters together with the optimizer state, and return both in the "
            "order in which the step takes them"
        )


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
