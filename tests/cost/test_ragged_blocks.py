"""Which blocks of rows are the fastest, by the rates of a chip."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmem.chips import rates_of
from jaxmem.cost.ragged_blocks import blocks_of

SDS = jax.ShapeDtypeStruct


def equations(rows, groups, inner, outer, dtype=jnp.bfloat16):
    """Of a product, the gradient of its rows and that of its matrices."""

    def grads(x, w, sizes, g):
        return jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)[1](g)

    args = (SDS((rows, inner), dtype), SDS((groups, inner, outer), dtype))
    sizes, g = SDS((groups,), jnp.int32), SDS((rows, outer), dtype)
    eqns = jax.make_jaxpr(grads)(*args, sizes, g).eqns
    found = [eqn for eqn in eqns if eqn.primitive.name == "ragged_dot_general"]
    assert len(found) >= 2
    return found


@pytest.mark.parametrize("chip", ["h100", "a100", "b200"])
def test_an_iteration_holds_little_and_a_block_is_of_many_rows(chip):
    rows, groups, inner, outer = 32_768, 64, 1024, 1024
    operands = 2 * (rows * (inner + outer) + groups * inner * outer)
    for eqn in equations(rows, groups, inner, outer):
        form = blocks_of(eqn, rates_of(chip))
        assert form is not None
        assert 64 <= form.rows <= 2 * rows // groups
        held = 2 * form.rows * (inner + outer) + 2 * inner * outer
        assert form.together == 1 or form.together * held <= max(operands / 8, 2**25)


def test_matrices_that_are_large_are_taken_one_at_a_time():
    for eqn in equations(262_144, 64, 7168, 2048):
        form = blocks_of(eqn, rates_of("h100"))
        assert form is not None and form.together <= 16
        assert form.rows >= 512


def test_of_two_groups_and_few_rows_xla_is_as_fast():
    for eqn in equations(16, 2, 64, 64):
        assert blocks_of(eqn, rates_of("h100")) is None
