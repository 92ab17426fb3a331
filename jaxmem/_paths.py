"""Leaves of a tree by path, and masks: patterns of paths, functions, trees of bools.

A path is the names that lead to a leaf, joined by slashes:
"encoder/layers_0/attention/kernel". A pattern selects a branch of the tree with all of
its leaves.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jaxmem._checks import shown

Pattern = str | re.Pattern[str]
Selector = Pattern | Callable[..., bool]
Ask = Callable[[Callable, str, Any], Any]  # calls a selector that is a function

_NEAREST = 3
_CODES = "qvalue"


def path_of(keys: Sequence[Any]) -> str:
    return keystr(tuple(keys), simple=True, separator="/")


def has_gradient(leaf: Any) -> bool:
    """Whether a leaf is an array of floats; keys and counters are never trained."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def in_quantized(paths: Iterable[str]) -> list[bool]:
    """Whether each path is in an array of codes and scales, as qwix's `QArray` is.

    Its leaves are `qvalue`, `scale` and `zero_point`. The scales are floats, but a
    gradient of theirs is not what a quantised weight is trained by.
    """
    names = [path.split("/") for path in paths]
    arrays = {tuple(n[: n.index(_CODES)]) for n in names if _CODES in n}
    within = lambda n: any(tuple(n[:i]) in arrays for i in range(1, len(n)))
    return [bool(arrays) and (within(n) or _CODES in n) for n in names]


def paths_and_leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(path_of(keys), leaf) for keys, leaf in jax.tree.leaves_with_path(tree)]


def matches(pattern: Pattern, path: str) -> bool:
    if isinstance(pattern, re.Pattern):
        return pattern.search(path) is not None
    return _on_branch(pattern.split("/"), path.split("/"))


def _on_branch(pattern: list[str], path: list[str]) -> bool:
    """Whether the pattern matches the first names of the path."""
    if not pattern:
        return True
    first, *rest = pattern
    if first == "**":
        return any(_on_branch(rest, path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], first) and _on_branch(rest, path[1:])


def selectors(mask: Any) -> tuple[Selector, ...] | None:
    """The mask as patterns and functions; None if it is something else."""
    given = tuple(mask) if isinstance(mask, list | tuple) else (mask,)
    if given and all(_is_selector(one) for one in given):
        return given
    return None


def _is_selector(one: Any) -> bool:
    function = callable(one) and not isinstance(one, type)
    return function or isinstance(one, str | re.Pattern)


def _of_both(fn: Callable, path: str, leaf: Any) -> Any:
    return fn(path, leaf)


def selected(
    who: str,
    named: Sequence[tuple[str, Any]],
    given: Sequence[Selector],
    ask: Ask = _of_both,
) -> list[bool]:
    """For each (path, leaf) whether any of the selectors wants it."""
    # `ask` calls a selector that is a function; `who` is named in errors.
    rows = [_selected_by(who, named, one, ask) for one in given]
    return [any(column) for column in zip(*rows, strict=True)]


def _selected_by(who, named, one: Selector, ask) -> list[bool]:
    if isinstance(one, str | re.Pattern):
        hits = [matches(one, path) for path, _ in named]
        check_matched(one, hits, named, who)
        return hits
    return [has_gradient(leaf) and bool(ask(one, path, leaf)) for path, leaf in named]


def check_matched(
    pattern: Pattern,
    hits: list[bool],
    named: Sequence[tuple[str, Any]],
    who: str = "trainable: mask",
) -> None:
    """ValueError for a pattern that matches no floating array: it is a mistake."""
    matched = [pair for pair, hit in zip(named, hits, strict=True) if hit]
    text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    if not matched:
        paths = [path for path, leaf in named if has_gradient(leaf)]
        raise ValueError(f"{who}: {text!r} matches no path; {hint(pattern, paths)}")
    if not any(has_gradient(leaf) for _, leaf in matched):
        path, leaf = matched[0]
        raise ValueError(
            f"{who}: {text!r} matches only what has no gradient, as {path!r} of "
            f"dtype {getattr(leaf, 'dtype', type(leaf).__name__)}"
        )


def hint(pattern: Pattern, paths: Sequence[str]) -> str:
    """Paths that a pattern without a match may have meant."""
    if not paths:
        return "there are no arrays of floats"
    if isinstance(pattern, re.Pattern):
        return f"the first paths are {_quoted(paths[:_NEAREST])}"
    deeper = f"**/{pattern}"
    candidates = [path for path in paths if matches(deeper, path)]
    if candidates:
        return f"{deeper!r} would match {_quoted(candidates[:_NEAREST])}"
    near = difflib.get_close_matches(pattern, paths, _NEAREST, cutoff=0.0)
    return f"the nearest paths are {_quoted(near)}"


def _quoted(paths: Sequence[str]) -> str:
    return ", ".join(map(repr, paths))


def check_bools(name: str, mask: Any, allowed: str) -> None:
    """TypeError for a tree with a leaf that is no bool."""
    for value in jax.tree.leaves(mask, is_leaf=lambda x: x is None):
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{name} must be {allowed}; got {shown(value)} instead")


def spread_bools(who: str, tree: Any, mask: Any, allowed: str) -> list[bool]:
    """A bool a leaf, of a tree of bools as optax takes masks: whole, or a prefix."""
    spread = lambda one, branch: jax.tree.map(lambda _: one, branch)
    try:
        whole = jax.tree.map(spread, mask, tree)
    except ValueError as error:
        raise ValueError(
            f"{who}={shown(mask)}: no pattern, no function, and no tree of bools of "
            f"the structure of the parameters or a prefix of it: {error}"
        ) from None
    # a None here is one of the tree's own, as qwix's missing zero points
    check_bools(who, jax.tree.leaves(whole), allowed)
    return [bool(value) for value in jax.tree.leaves(whole)]


_ALLOWED = "path patterns, a function (path) -> bool, or a tree of bools"


def check_selection(who: str, given: Any) -> None:
    """TypeError for what selects no leaves; None is fine."""
    if given is not None and selectors(given) is None:
        check_bools(who, given, _ALLOWED)


def selection(who: str, given: Any, tree: Any) -> list[bool]:
    """For each leaf whether `given` selects it; a function is asked for the path."""
    return wanted_leaves(who, given, tree, _ALLOWED, lambda fn, path, leaf: fn(path))


def wanted_leaves(
    who: str, given: Any, tree: Any, allowed: str, ask: Ask = _of_both
) -> list[bool]:
    """For each leaf whether selectors, or a tree of bools, want it."""
    chosen = selectors(given)
    if chosen is None:
        return spread_bools(who, tree, given, allowed)
    return selected(who, paths_and_leaves(tree), chosen, ask)
