"""Which outputs of a traced function depend on its inputs."""

from collections.abc import Callable

import jax
from jaxtyping import PyTree

from jaxmem.ir import primitives


def dependent_paths(fn: Callable, tree: PyTree) -> list[str]:
    """Paths of the leaves of `fn(tree)` that depend on any leaf of the tree."""
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(tree)
    tainted = _tainted_outputs(closed.jaxpr, [True] * len(closed.in_avals))
    leaves = zip(jax.tree.leaves_with_path(shapes), tainted, strict=True)
    return [jax.tree_util.keystr(path) for (path, _), depends in leaves if depends]


def _tainted_outputs(jaxpr, tainted: list[bool]) -> list[bool]:
    # by identity: literals, which stand among the variables, are not hashable
    live = {id(v) for v, t in zip(jaxpr.invars, tainted, strict=True) if t}
    for eqn in jaxpr.eqns:
        outs = _through(eqn, [id(v) in live for v in eqn.invars])
        live |= {id(v) for v, t in zip(eqn.outvars, outs, strict=True) if t}
    return [id(v) in live for v in jaxpr.outvars]


def _through(eqn, tainted: list[bool]) -> list[bool]:
    """Output by output for a jitted function; all outputs alike for any other."""
    if primitives.is_jit(eqn):
        return _tainted_outputs(eqn.params["jaxpr"].jaxpr, tainted)
    return [any(tainted)] * len(eqn.outvars)
