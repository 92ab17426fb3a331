"""An object split into its arrays, which a jitted function takes, and the rest."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.tree_util import GetAttrKey


@jax.tree_util.register_pytree_with_keys_class
class SplitObject:
    """A pytree of the arrays of an object."""

    def __init__(self, arrays: Iterable[Any], names: Sequence[str], definition: Any):
        self.arrays = tuple(arrays)
        self.names = tuple(names)  # as paths inside the object: "layers[0].kernel"
        self.definition = definition  # all else of the object, hashable

    def tree_flatten(self):
        return self.arrays, (self.names, self.definition)

    def tree_flatten_with_keys(self):
        keys = map(GetAttrKey, self.names)
        return tuple(zip(keys, self.arrays, strict=True)), (self.names, self.definition)

    @classmethod
    def tree_unflatten(cls, aux, arrays):
        return cls(arrays, *aux)


def is_split(x: Any) -> bool:
    """Whether this is the `SplitObject` of an nnx object or an Equinox module."""
    return isinstance(x, SplitObject)
