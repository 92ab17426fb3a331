"""States of optimizers that a framework holds by keys, as an `nnx.Optimizer` does.

It takes a state apart after each update, and what has fields of its own at the place of
a parameter, such as codes and scales, is then an `nnx.State` of these fields.
"""

from typing import Any

import jax
from jaxtyping import PyTree

from jaxmem._paths import paths_and_leaves
from jaxmem.frameworks import Framework, taking_apart


def held_by_keys(tx: Any) -> Any:
    """A transformation whose states keep one structure in such a framework.

    Args:
      tx: an optax transformation, whose `init` can be traced.

    Returns:
      The transformation, of the same class. For parameters of such a framework, tuples
      at the place of a parameter are by keys from `init` on; for others it is `tx`.
    """

    def init(params: PyTree) -> Any:
        made: Any = tx.init(params)
        framework = taking_apart(params)
        return made if framework is None else _by_keys(framework, made)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> Any:
        framework = taking_apart(updates)
        if framework is None:
            return tx.update(updates, state, params, **extra)
        made = jax.eval_shape(tx.init, updates if params is None else params)
        u, new = tx.update(updates, _as_made(made, state), params, **extra)
        return u, _by_keys(framework, new)

    return type(tx)(init, update)


def _by_keys(framework: Framework, tree: Any) -> Any:
    """The tree, with tuples below what the framework has in place of the parameters."""
    is_tuple = lambda x: isinstance(x, tuple)
    # `optax.MaskedNode` is a tuple of nothing
    has_fields = lambda x: is_tuple(x) and jax.tree.leaves(x)
    apart = lambda x: framework.by_keys(x) if has_fields(x) else x
    takes = framework.takes_apart
    below = lambda x: jax.tree.map(apart, x, is_leaf=is_tuple) if takes(x) else x
    return jax.tree.map(below, tree, is_leaf=takes)


def _as_made(made: Any, state: Any) -> Any:
    """The state's arrays in the structure that `init` makes, if they are the same."""
    # a path is the same whatever holds the leaves
    paths, found = dict(paths_and_leaves(made)), dict(paths_and_leaves(state))
    if paths.keys() != found.keys():
        return state  # of other parameters: the transformation says so
    return jax.tree.unflatten(jax.tree.structure(made), [found[p] for p in paths])
