"""Products of groups of rows: their flops, and of what a GPU has copies."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmem.ir import ragged

ROWS, WIDTH, OUT, GROUPS, BATCH = 32, 6, 10, 5, 3
SDS = jax.ShapeDtypeStruct
SIZES = SDS((GROUPS,), jnp.int32)


def like(*shape):
    return SDS(shape, jnp.float32)


def general(contracted, batched, rows, groups=()):
    """A product with these axes, of the left operand and of the right one."""
    axes = (contracted, batched)
    numbers = lax.RaggedDotDimensionNumbers(axes, rows, groups)
    return lambda x, w, sizes: lax.ragged_dot_general(x, w, sizes, numbers)


FLOPS = 2 * ROWS * WIDTH * OUT
# the product; its operands and sizes; flops, and operands that are copied
CASES = {
    "rows of groups": (
        lax.ragged_dot,
        (like(ROWS, WIDTH), like(GROUPS, WIDTH, OUT), SIZES),
        (FLOPS, (0,)),
    ),
    "the gradient of the matrices": (
        general(((0,), (0,)), ((), ()), [0]),
        (like(ROWS, WIDTH), like(ROWS, OUT), SIZES),
        (FLOPS, (0, 1)),
    ),
    "groups of a batch": (
        general(((2,), (1,)), ((0,), (0,)), [0]),
        (like(BATCH, ROWS, WIDTH), like(BATCH, WIDTH, OUT), SIZES),
        (BATCH * FLOPS, ()),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_flops_and_copies(name):
    fn, args, (flops, copied) = CASES[name]
    (eqn,) = jax.make_jaxpr(fn)(*args).eqns
    assert ragged.is_ragged(eqn) and ragged.groups(eqn) == GROUPS
    assert ragged.ragged_flops(eqn) == flops
    assert ragged.copied_rows(eqn) == copied


def test_other_products_are_not_ragged():
    (eqn,) = jax.make_jaxpr(jnp.dot)(like(ROWS, WIDTH), like(WIDTH, OUT)).eqns
    assert not ragged.is_ragged(eqn)
