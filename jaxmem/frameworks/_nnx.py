"""Flax nnx objects: split at the call, merged in the trace, updated in place after it.

A step updates the objects that it is given, and returns no new ones: `nnx.jit` carries
their arrays in and out. So does this, by the same contexts of nnx, which keep track of
what is shared between arguments, of attributes that appear, and of objects that the
step returns.

What a step leaves as it was is no output, unless its buffer was given up.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import DictKey, tree_flatten_with_path

from jaxmem.frameworks._parts import Parts

_TAG = "jaxmem"  # names the context that split, step and merge share


@dataclass(frozen=True)
class Graph:
    """All of an nnx object but its arrays.

    Attributes:
      graphdef: its definition, as `nnx.split` returns it.
      structure: that of its state.
    """

    graphdef: Any
    structure: Any


@dataclass(frozen=True)
class Kept:
    """In the place of an array that the step has left as it was: the input's number."""

    number: int


jax.tree_util.register_static(Kept)


def is_object(x: Any) -> bool:
    """Whether a step may update it in place; Flax is not imported to find out.

    An `nnx.State` is a pytree for functional steps: it is returned, not updated.
    """
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Pytree | nnx.Variable)


def is_state(x: Any) -> bool:
    """Whether it is a state that was split off an object."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.State | nnx.GraphDef)


@contextlib.contextmanager
def carried() -> Iterator[None]:
    """Round a call: splitting, the step, merging."""
    from flax import nnx

    with nnx.update_context(_TAG):
        yield


@contextlib.contextmanager
def splitting() -> Iterator[Any]:
    """Gives a function from an object to its `Parts`; what is shared is there once."""
    from flax import nnx

    with nnx.split_context(_TAG) as context:

        def split(node: Any) -> Parts:
            graphdef, state = context.split(node)
            found, structure = tree_flatten_with_path(state)
            names = [_name(path) for path, _ in found]
            return Parts([x for _, x in found], names, Graph(graphdef, structure))

        yield split


@contextlib.contextmanager
def merging(inner: bool) -> Iterator[Any]:
    """Gives the inverse of `splitting`.

    Args:
      inner: whether this is in the trace, where objects are made; outside, those that
        were split are updated.
    """
    from flax import nnx

    with nnx.merge_context(_TAG, inner) as context:

        def merge(parts: Parts) -> Any:
            graph = parts.recipe
            state = jax.tree.unflatten(graph.structure, parts.leaves)
            return context.merge(graph.graphdef, state)

        yield merge


def _name(path) -> str:
    """The path in a state as people write it: `layers[0].kernel`."""
    keys = [key.key for key in path if isinstance(key, DictKey)]
    text = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return "".join(text).removeprefix(".")
