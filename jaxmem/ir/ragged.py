"""Products of groups of rows, `jax.lax.ragged_dot`: their flops, and what a GPU makes.

XLA:GPU has no such product: it multiplies all rows by each group's matrix, with a copy
of the rows for each group in which those of other groups are zero.
"""

from jaxmem.ir.jaxprs import elements
from jaxmem.ir.types import JaxprEqn


def is_ragged(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "ragged_dot_general"


def ragged_flops(eqn: JaxprEqn) -> float:
    """Multiplications and additions, if every row is in one group."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, summed), (_, batched) = numbers.dot_dimension_numbers
    taken = {*summed, *batched, *numbers.rhs_group_dimensions}
    lhs, rhs, _ = (v.aval.shape for v in eqn.invars)
    free = (size for axis, size in enumerate(rhs) if axis not in taken)
    return 2.0 * elements(lhs) * elements(list(free))


def copied_rows(eqn: JaxprEqn) -> tuple[int, ...]:
    """Which operands a GPU has a copy of for each group."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (first, _), (batched, _) = numbers.dot_dimension_numbers
    (rows,) = numbers.lhs_ragged_dimensions
    if rows in batched:
        return ()
    # a matrix for each group is the result where the sum is over the rows
    return (0, 1) if rows in first else (0,)


def groups(eqn: JaxprEqn) -> int:
    """How many there are."""
    return eqn.invars[2].aval.shape[-1]
