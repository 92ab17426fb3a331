"""What `jax.checkpoint` keeps, and what its policies name."""

from typing import Any

import jax


def saved_residuals(fn, *args: Any, **kwargs: Any) -> list[tuple[Any, str]]:
    """(aval, source text) of each value that the backward pass of `fn` keeps."""
    from jax._src.ad_checkpoint import saved_residuals as impl

    return impl(fn, *args, **kwargs)


def policy_names(policy) -> tuple[frozenset[str], frozenset[str]]:
    """The `checkpoint_name`s that one of jax's own policies (saves, offloads)."""
    # jax 0.11 has objects for some of the functions of 0.10 and 0.12
    inside = {**getattr(policy, "__dict__", {}), **_closure(policy)}
    saved = getattr(policy, "saveable_names", frozenset())
    saved = saved.union(inside.get("names_which_can_be_saved", ()))
    moved = frozenset(inside.get("names_which_can_be_offloaded", ()))
    for key in ("policy_1", "policy_2"):
        if key in inside:
            both = policy_names(inside[key])
            saved, moved = saved | both[0], moved | both[1]
    return saved, moved


def forgets_its_names(policy) -> bool:
    """Whether it is a `save_anything_except_these_names` that does not look at them."""
    maker = jax.checkpoint_policies.save_anything_except_these_names.__name__
    name = getattr(policy, "__qualname__", "").split(".")[0]
    return name == maker and not _closure(policy)


def _closure(fn) -> dict[str, Any]:
    """The names that a function closes over, and what they are."""
    cells = getattr(fn, "__closure__", None) or ()
    names = fn.__code__.co_freevars if cells else ()
    return {n: cell.cell_contents for n, cell in zip(names, cells, strict=True)}
