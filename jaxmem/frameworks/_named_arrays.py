"""The arrays of a tree by their paths, those inside of models included."""

from collections.abc import Iterator
from typing import Any

import jax

from jaxmem._paths import path_of
from jaxmem.frameworks.registry import owner_of


def named_arrays(tree: Any) -> Iterator[tuple[str, Any]]:
    """(path, leaf) of every leaf of a pytree, in which models of any framework may be.

    Args:
      tree: a pytree of arrays and models, or one of these.
    """
    is_owned = lambda x: owner_of(x) is not None
    for keys, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_owned):
        owner = owner_of(leaf)
        before = [path_of(keys)] if keys else []
        if owner is None:
            yield "".join(before), leaf
            continue
        for path, x in owner.arrays(leaf):
            yield "/".join([*before, *map(str, path)]), x
