"""Calls of public functions, and values that one argument of each must refuse."""

from tests.bad_calls import functions, layers, operations, optimizers, steps

CALLS = [
    *optimizers.CALLS,
    *steps.CALLS,
    *functions.CALLS,
    *operations.CALLS,
    *layers.CALLS,
]
