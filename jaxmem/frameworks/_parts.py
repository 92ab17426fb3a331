"""An object whose arrays a jitted function can take: its arrays, and all else."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import GetAttrKey


@jax.tree_util.register_pytree_with_keys_class
class Parts:
    """The arrays of an object as leaves, and the recipe that makes the object of them.

    Attributes:
      leaves: the arrays.
      names: of each leaf, as its path inside the object: "layers[0].kernel".
      recipe: hashable; knows how to put leaves in again.
    """

    def __init__(self, leaves: Sequence[Any], names: Sequence[str], recipe: Any):
        self.leaves = tuple(leaves)
        self.names = tuple(names)
        self.recipe = recipe

    def tree_flatten(self):
        return self.leaves, (self.names, self.recipe)

    def tree_flatten_with_keys(self):
        keys = map(GetAttrKey, self.names)
        return tuple(zip(keys, self.leaves, strict=True)), (self.names, self.recipe)

    @classmethod
    def tree_unflatten(cls, aux, leaves):
        return cls(leaves, *aux)


def is_parts(x: Any) -> bool:
    return isinstance(x, Parts)
