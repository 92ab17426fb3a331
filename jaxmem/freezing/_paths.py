"""Leaves of a tree by path, and patterns of paths.

A path is what leads to a leaf, joined by slashes: "encoder/layers_0/attention/kernel".
A pattern names a branch of the tree, and with it all that grows on it.
"""

import difflib
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

_NEAREST = 3


def path_of(keys: Sequence[Any]) -> str:
    return keystr(tuple(keys), simple=True, separator="/")


def has_gradient(leaf: Any) -> bool:
    """Whether a leaf is an array of floats; keys and counters are never trained."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def paths_and_leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(path_of(keys), leaf) for keys, leaf in jax.tree.leaves_with_path(tree)]


def matches(pattern: str | re.Pattern[str], path: str) -> bool:
    if isinstance(pattern, re.Pattern):
        return pattern.search(path) is not None
    return _on_branch(pattern.split("/"), path.split("/"))


def _on_branch(pattern: list[str], path: list[str]) -> bool:
    """Whether the path begins with what the pattern names."""
    if not pattern:
        return True
    first, *rest = pattern
    if first == "**":
        return any(_on_branch(rest, path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], first) and _on_branch(rest, path[1:])


def hint(pattern: str | re.Pattern[str], paths: Sequence[str]) -> str:
    """What may have been meant by a pattern that matches no path."""
    if isinstance(pattern, re.Pattern):
        return f"the first paths are {_quoted(paths[:_NEAREST])}"
    deeper = f"**/{pattern}"
    found = [path for path in paths if matches(deeper, path)]
    if found:
        return f"{deeper!r} would match {_quoted(found[:_NEAREST])}"
    near = difflib.get_close_matches(pattern, paths, _NEAREST, cutoff=0.0)
    return f"the nearest paths are {_quoted(near)}"


def _quoted(paths: Sequence[str]) -> str:
    return ", ".join(map(repr, paths))
