"""Calls of public functions, and values that one argument of each must refuse."""

from tests.bad_calls import (
    averaged,
    factored,
    functions,
    layers,
    operations,
    optimizers,
    orthogonal,
    preconditioned,
    steps,
)

CALLS = [
    *optimizers.CALLS,
    *factored.CALLS,
    *orthogonal.CALLS,
    *preconditioned.CALLS,
    *averaged.CALLS,
    *steps.CALLS,
    *functions.CALLS,
    *operations.CALLS,
    *layers.CALLS,
]
