"""What only `jax.extend` can do: an operation that cannot be lowered, and says why."""

from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

_refused = Primitive("refused")
_refused.multiple_results = True


def refused(args: Any, like: Any, message: str) -> Any:
    """Arrays like `like`, made of `args`; raises ValueError when it is lowered."""
    leaves, tree = jax.tree.flatten(like)
    kinds = tuple((x.shape, x.dtype) for x in leaves)
    outs = _refused.bind(*jax.tree.leaves(args), kinds=kinds, message=message)
    return jax.tree.unflatten(tree, outs)


@_refused.def_abstract_eval
def _abstract(*avals, kinds, message):
    return [ShapedArray(shape, dtype) for shape, dtype in kinds]


def _raise(*args, message, **params):
    raise ValueError(message)


_refused.def_impl(_raise)
mlir.register_lowering(_refused, lambda ctx, *args, **params: _raise(**params))


def _batched(args, dims, *, kinds, message):
    sizes = [x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None]
    kinds = tuple(((sizes[0], *shape), dtype) for shape, dtype in kinds)
    return _refused.bind(*args, kinds=kinds, message=message), [0] * len(kinds)


batching.primitive_batchers[_refused] = _batched
