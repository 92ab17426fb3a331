"""Primitives of our own that stand for several elementwise operations."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.interpreters import mlir

_FUNCTIONS: dict[Any, Callable] = {}


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
    return made.bind


def function_of(primitive) -> Callable | None:
    """What a primitive of `word_operation` stands for; None for all others."""
    return _FUNCTIONS.get(primitive)
