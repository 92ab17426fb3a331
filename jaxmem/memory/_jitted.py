"""What a step that is already jitted says of its own arguments."""

import itertools
from typing import Any

import jax

from jaxmem.memory._step import Place


def own_arguments(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[frozenset[Place], frozenset[Place]]:
    """(donated, static) positions and keywords of `jax.jit`'s own arguments."""
    traced = fn.trace(*args, **kwargs)
    # nnx.jit wraps jax's own stage in one of its own
    info = getattr(traced, "traced", traced).args_info
    static = _static_positions(args, info[0])
    dynamic = [i for i in range(len(args)) if i not in static]
    donated = [i for i, arg in zip(dynamic, info[0], strict=True) if _donated(arg)]
    donated += [key for key, arg in info[1].items() if _donated(arg)]
    missing = [key for key in kwargs if key not in info[1]]
    return frozenset(donated), frozenset([*static, *missing])


def _donated(info: Any) -> bool:
    return any(leaf.donated for leaf in jax.tree.leaves(info))


def _static_positions(args: tuple[Any, ...], info: tuple[Any, ...]) -> tuple[int, ...]:
    """The positions to leave out so that the rest fits what jit traced.

    Several choices fit when equal scalars stand side by side: the one that leaves out
    what is least like an array wins.
    """
    count = len(args) - len(info)
    if not count:
        return ()
    choices = [
        choice
        for choice in itertools.combinations(range(len(args)), count)
        if _fits([a for i, a in enumerate(args) if i not in choice], info)
    ]
    return min(
        choices, key=lambda c: sum(hasattr(args[i], "shape") for i in c), default=()
    )


def _fits(args: list[Any], info: tuple[Any, ...]) -> bool:
    def matches(arg: Any, traced: Any) -> bool:
        leaves, described = jax.tree.leaves(arg), jax.tree.leaves(traced)
        return len(leaves) == len(described) and all(
            getattr(leaf, "shape", ()) == one.shape
            for leaf, one in zip(leaves, described, strict=True)
        )

    return all(matches(arg, one) for arg, one in zip(args, info, strict=True))
