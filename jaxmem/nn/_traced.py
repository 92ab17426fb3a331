"""Running a function of any arguments through the jaxpr rewriter.

Arrays become arguments of the traced function; everything else (bools, strings,
modules, numpy arrays) stays as it is, and keeps its Python value inside.
"""

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

import jax
import jax.core

from jaxmem._contexts import set_within
from jaxmem.ir.jaxprs import exchanged
from jaxmem.ops.codes import marking

# What a function that looks at the values of its arguments raises under a trace.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
UNTRACEABLE = (
    "the model looks at values of its arguments, so it cannot be traced; "
    "modules are replaced, formulas outside of them are not"
)

# Names of the formulas that are replaced in what is being traced.
_replaced: contextvars.ContextVar[frozenset[str]]
_replaced = contextvars.ContextVar("jaxmem_replaced", default=frozenset())


def is_replaced(formula: str) -> bool:
    """Whether a formula is replaced in what is traced now.

    A layer that is one runs as Flax has it then: it may be part of a larger formula, as
    dropout is of attention, which is not found around a lean op.
    """
    return formula in _replaced.get()


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


def split_arrays(
    tree: Any, is_array: Callable[[Any], bool] = _is_array
) -> tuple[list[Any], Callable[[list], Any]]:
    """The jax arrays in `tree`, and the function that puts others in their place."""
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    arrays = [leaves[i] for i in places]
    # The closure must not keep the arrays alive, nor leak tracers out of a trace.
    rest = [None if is_array(leaf) else leaf for leaf in leaves]

    def rebuild(others):
        return jax.tree.unflatten(treedef, exchanged(rest, places, others))

    return arrays, rebuild


def run_rewritten(fn: Callable, args: tuple, patterns, on_report, codes=False) -> Any:
    """`fn(*args)`, with the formulas in its jaxpr replaced by lean ops."""
    from jaxmem.rewriting import rewrite, share_codes

    arrays, rebuild = split_arrays(args)
    rebuild_output = []

    def pure(*arrays):
        # With codes, layers that store them share them with those before and after.
        names = frozenset(pattern.name for pattern in patterns)
        shared = marking() if codes else contextlib.nullcontext()
        with shared, set_within(_replaced, names):
            out, rebuild_out = split_arrays(fn(*rebuild(list(arrays))))
        rebuild_output[:] = [rebuild_out]
        return out

    lean = rewrite(pure, patterns, on_report=on_report)
    out = (share_codes(lean) if codes else lean)(*arrays)
    return rebuild_output[0](out)


def is_concrete(tree: Any) -> bool:
    """Whether no leaf is a tracer, so that Python may look at values."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
