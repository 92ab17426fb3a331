"""`Pytrees`: what the frameworks share whose models are pytrees."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from jaxmem.frameworks._split_object import SplitObject
from jaxmem.frameworks.framework import Framework
from jaxmem.frameworks.training import Wanted
from jaxmem.ir import jaxprs


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


class Pytrees(Framework):
    """All arrays of a model are trained, and `jax.jit` takes it as it is."""

    is_pytree: ClassVar[bool] = True

    def owns(self, x: Any) -> bool:
        del x
        return False

    def split(self, x: Any) -> SplitObject:
        """The arrays of a pytree, and the other leaves as they are."""
        leaves, structure = tree_flatten_with_path(x)
        is_array = tuple(jaxprs.is_array(leaf) for _, leaf in leaves)
        pairs = list(zip(leaves, is_array, strict=True))
        rest = tuple(None if dynamic else leaf for (_, leaf), dynamic in pairs)
        named = [
            (keystr(path).removeprefix("."), leaf)
            for (path, leaf), dynamic in pairs
            if dynamic
        ]
        definition = StaticLeaves(structure, rest, is_array)
        arrays = [x for _, x in named]
        return SplitObject(arrays, [name for name, _ in named], definition, self)

    def merge(self, split: SplitObject) -> Any:
        return split.definition.merge(split.arrays)

    def select(self, model: Any, wanted: Wanted) -> tuple[Any, Any, Any]:
        """None stands in each tree where the other has its leaf."""
        leaves, structure = tree_flatten_with_path(model)
        hits = [wanted(path, x) for path, x in leaves]
        chosen, others = (
            structure.unflatten(
                [
                    x if hit is want else None
                    for (_, x), hit in zip(leaves, hits, strict=True)
                ]
            )
            for want in (True, False)
        )
        return chosen, others, None

    def combine(self, chosen: Any, others: Any, rest: Any = None) -> Any:
        del rest
        if others is None:
            return chosen
        # names and paths stay, optimizers skip a None, and the structure tells which
        # leaf is trained when a step is traced
        is_gap = lambda x: x is None
        either = lambda a, b: b if a is None else a
        return jax.tree.map(either, chosen, others, is_leaf=is_gap)

    def partition(self, model: Any) -> tuple[Any, Any, Any]:
        return model, None, None
