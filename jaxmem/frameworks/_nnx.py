"""Flax nnx objects: split at the call, merged in the trace, updated in place after it.

This uses the contexts of `nnx.jit`, which keep track of Variables that arguments share,
of new attributes, and of objects that the step returns.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import DictKey, tree_flatten_with_path

from jaxmem.frameworks._split_object import SplitObject

_TAG = "jaxmem"  # names the context that split, step and merge share


@dataclass(frozen=True)
class ObjectDefinition:
    """All of an nnx object but its arrays."""

    graphdef: Any  # its definition, as `nnx.split` returns it
    structure: Any  # that of its state


def is_object(x: Any) -> bool:
    """Whether a step may update it in place; Flax is not imported to find out."""
    # An `nnx.State` is a pytree for functional steps, which return it.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Pytree | nnx.Variable)


def is_state(x: Any) -> bool:
    """Whether it is a state or a definition that `nnx.split` returns."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.State | nnx.GraphDef)


@contextlib.contextmanager
def carried() -> Iterator[None]:
    """The context of a call: of splitting, the step and merging."""
    from flax import nnx

    with nnx.update_context(_TAG):
        yield


@contextlib.contextmanager
def splitting() -> Iterator[Any]:
    """Gives a function from an object to its `SplitObject`."""
    # A Variable that several objects share is in the first of them.
    from flax import nnx

    with nnx.split_context(_TAG) as context:

        def split(node: Any) -> SplitObject:
            graphdef, state = context.split(node)
            leaves, structure = tree_flatten_with_path(state)
            names = [_name(path) for path, _ in leaves]
            definition = ObjectDefinition(graphdef, structure)
            return SplitObject([x for _, x in leaves], names, definition)

        yield split


@contextlib.contextmanager
def merging(inner: bool) -> Iterator[Any]:
    """Gives the inverse of `splitting`: in a trace, objects are made, else updated."""
    from flax import nnx

    with nnx.merge_context(_TAG, inner) as context:

        def merge(split: SplitObject) -> Any:
            definition = split.definition
            state = jax.tree.unflatten(definition.structure, split.arrays)
            return context.merge(definition.graphdef, state)

        yield merge


def _name(path) -> str:
    """The path in a state as people write it: `layers[0].kernel`."""
    keys = [key.key for key in path if isinstance(key, DictKey)]
    text = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return "".join(text).removeprefix(".")
