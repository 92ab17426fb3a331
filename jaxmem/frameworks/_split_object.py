"""An object split into its arrays, which a jitted function takes, and the rest."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.tree_util import GetAttrKey


@jax.tree_util.register_pytree_with_keys_class
class SplitObject:
    """A pytree of the arrays of an object.

    Args:
      arrays: its arrays.
      names: their paths inside the object: "layers[0].kernel".
      definition: all else of the object; it compares and has a hash.
      owner: the framework that merges it.
    """

    def __init__(
        self, arrays: Iterable[Any], names: Sequence[str], definition: Any, owner: Any
    ):
        self.arrays = tuple(arrays)
        self.names = tuple(names)
        self.definition = definition
        self.owner = owner

    @property
    def _aux(self) -> tuple[Any, ...]:
        return self.names, self.definition, self.owner

    def replace(self, arrays: Iterable[Any]) -> "SplitObject":
        """The same with other arrays, or with None in their place."""
        return SplitObject(arrays, *self._aux)

    def tree_flatten(self):
        return self.arrays, self._aux

    def tree_flatten_with_keys(self):
        keys = map(GetAttrKey, self.names)
        return tuple(zip(keys, self.arrays, strict=True)), self._aux

    @classmethod
    def tree_unflatten(cls, aux, arrays):
        return cls(arrays, *aux)


def is_split(x: Any) -> bool:
    """Whether this is the `SplitObject` of an object of a framework."""
    return isinstance(x, SplitObject)
