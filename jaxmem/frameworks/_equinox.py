"""Equinox modules: pytrees whose leaves are not all arrays.

As in `equinox.filter_jit`, arrays are traced, and everything else is static.
"""

import sys
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from jaxmem.frameworks._split_object import SplitObject
from jaxmem.ir import jaxprs as _jaxpr


@dataclass(frozen=True)
class StaticLeaves:
    """All of a pytree but its arrays; `rest` has None where an array was."""

    # They compare and hash, so that a jitted function is traced anew if one changes.
    structure: Any
    rest: tuple[Any, ...]
    is_array: tuple[bool, ...]

    def merge(self, arrays) -> Any:
        """The pytree with these arrays in it."""
        arrays = iter(arrays)
        pairs = zip(self.is_array, self.rest, strict=True)
        leaves = [next(arrays) if dynamic else leaf for dynamic, leaf in pairs]
        return jax.tree.unflatten(self.structure, leaves)


def is_module(x: Any) -> bool:
    """Whether it is an Equinox module; Equinox is not imported to find out."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(x, equinox.Module)


def split(tree: Any) -> SplitObject:
    """The arrays of a pytree, and the rest as its definition."""
    leaves, structure = tree_flatten_with_path(tree)
    is_array = tuple(_jaxpr.is_array(leaf) for _, leaf in leaves)
    pairs = list(zip(leaves, is_array, strict=True))
    rest = tuple(None if dynamic else leaf for (_, leaf), dynamic in pairs)
    names = [keystr(path).removeprefix(".") for (path, _), dynamic in pairs if dynamic]
    arrays = [leaf for (_, leaf), dynamic in pairs if dynamic]
    return SplitObject(arrays, names, StaticLeaves(structure, rest, is_array))
