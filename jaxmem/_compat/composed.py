"""Primitives that stand for several operations: our own for words, and of others."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from jaxmem._compat.avals import vary, varying_axes

_FUNCTIONS: dict[Any, Callable] = {}  # what these primitives stand for


def word_operation(name: str, function: Callable, operands: int) -> Callable:
    """A function of words that is one equation when it is traced.

    What a jaxpr is asked takes time by its equations, and a hash has dozens of them
    which nobody tells apart. It is lowered to what the function is traced to.

    Args:
      name: of the primitive.
      function: of uint32 arrays of one rank and of scalars, elementwise; axes of length
        1 are broadcast.
      operands: how many it has.
    """
    from jax._src.interpreters import ad
    from jax._src.lax import lax

    word = {np.unsignedinteger}
    one = operands == 1
    make = lax.standard_unop if one else lax.standard_naryop
    made = make(word if one else [word] * operands, name)
    ad.defjvp_zero(made)
    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=False))
    _FUNCTIONS[made] = function

    def called(*words: Any) -> Any:
        axes = varying_axes(*words)  # as functions of `lax` do under `shard_map`
        return made.bind(*(vary(x, axes) for x in words))

    return called


def expanded(eqn, args) -> list[Any] | None:
    """Outputs of what stands for several operations, by these; or None.

    Of what `operation` reads, and of what `word_operation` makes.
    """
    if function := _FUNCTIONS.get(eqn.primitive):
        return [function(*args)]
    whole = eqn.params.get("_prim")
    if eqn.primitive.name != "call_hi_primitive" or whole is None:
        return None
    return jax.tree.leaves(whole.expand(*jax.tree.unflatten(whole.in_tree, args)))
