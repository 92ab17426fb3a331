"""What the user gives as a mask, as one bool for each leaf."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmem.freezing._paths import has_gradient, hint, matches, paths_and_leaves

Selector = str | re.Pattern[str] | Callable[..., bool]


def selectors(mask: Any) -> tuple[Selector, ...] | None:
    """The mask as patterns and functions, or None where it is a tree of bools."""
    given = tuple(mask) if isinstance(mask, list | tuple) else (mask,)
    if given and all(_is_selector(one) for one in given):
        return given
    return None


def _is_selector(one: Any) -> bool:
    function = callable(one) and not isinstance(one, type)
    return function or isinstance(one, str | re.Pattern)


def chosen(params: Any, mask: Any) -> list[bool]:
    """For each leaf whether it is trained; ValueError where none is."""
    named = paths_and_leaves(params)
    if not any(has_gradient(leaf) for _, leaf in named):
        raise ValueError("trainable: params hold no array of floats")
    given = selectors(mask)
    wanted = _of_tree(params, mask) if given is None else _of_selectors(named, given)
    picked = [w and has_gradient(x) for w, (_, x) in zip(wanted, named, strict=True)]
    if not any(picked):
        raise ValueError(
            f"trainable: the mask selects none of {len(named)} arrays, so there is "
            "nothing to train"
        )
    return picked


def _of_selectors(
    named: Sequence[tuple[str, Any]], given: Sequence[Selector]
) -> list[bool]:
    rows = [_of_selector(named, one) for one in given]
    return [any(column) for column in zip(*rows, strict=True)]


def _of_selector(named: Sequence[tuple[str, Any]], one: Selector) -> list[bool]:
    if isinstance(one, str | re.Pattern):
        found = [matches(one, path) for path, _ in named]
        check_found(one, found, named)
        return found
    return [has_gradient(leaf) and bool(one(path, leaf)) for path, leaf in named]


def check_found(
    pattern: str | re.Pattern[str], found: list[bool], named: Sequence[tuple[str, Any]]
) -> None:
    """A pattern that finds nothing to train is a mistake."""
    hits = [pair for pair, hit in zip(named, found, strict=True) if hit]
    said = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    if not hits:
        paths = [path for path, leaf in named if has_gradient(leaf)]
        raise ValueError(f"trainable: {said!r} matches no path; {hint(pattern, paths)}")
    if not any(has_gradient(leaf) for _, leaf in hits):
        path, leaf = hits[0]
        raise ValueError(
            f"trainable: {said!r} matches only what has no gradient, as {path!r} of "
            f"dtype {getattr(leaf, 'dtype', type(leaf).__name__)}"
        )


def _of_tree(params: Any, mask: Any) -> list[bool]:
    """Bools of a tree that is params' own or a prefix of it, as optax takes them."""
    spread = lambda one, branch: jax.tree.map(lambda _: one, branch)
    try:
        whole = jax.tree.map(spread, mask, params)
    except ValueError as error:
        raise ValueError(
            "trainable: the mask is no pattern, no function, and no tree of bools of "
            f"the structure of params or a prefix of it: {error}"
        ) from None
    values = jax.tree.leaves(whole)
    for value in values:
        if not isinstance(value, bool | np.bool_):
            raise TypeError(
                "trainable: mask must be path patterns, a function (path, leaf) -> "
                f"bool, or a tree of bools; got {value!r} in its place"
            )
    return [bool(value) for value in values]
