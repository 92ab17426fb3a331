"""Products of groups of rows in blocks, and their gradients: as by `ragged_dot`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmem.ir import jaxprs
from jaxmem.ir.ragged_blocks import RowBlocks, in_blocks, ragged_shape

SDS = jax.ShapeDtypeStruct
SHAPES = [(50, 7, 3, 5), (33, 1, 4, 8)]
FORMS = [RowBlocks(4, 1), RowBlocks(8, 3), RowBlocks(64, 8)]


def sizes_of(rows: int, groups: int):
    """Rows of each group: spread, all in one, fewer than there are, and none."""
    rng = np.random.default_rng(0)
    even = np.full(groups, 1 / groups)
    yield rng.multinomial(rows, even)
    yield rows * np.eye(groups, dtype=int)[groups // 2]
    yield rng.multinomial(rows // 2, even)
    yield np.zeros(groups, int)


def both_passes(x, w, sizes):
    """The product, and the gradients of its operands for another array."""
    y, pull = jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)
    return y, *pull(jnp.cos(y))


def converted(fn, form: RowBlocks):
    def run(*args):
        def rule(eqn, args):
            return [in_blocks(eqn, args, form)] if ragged_shape(eqn) else None

        return jaxprs.evaluate(jax.make_jaxpr(fn)(*args), args, rule)

    return run


def operands(rows, groups, inner, outer, dtype):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((rows, inner))
    w = rng.standard_normal((groups, inner, outer))
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


# A group's rows are summed in float32 in either form, and rounded once.
TOLERANCES = {jnp.float32: 1e-5, jnp.bfloat16: 2.0**-7}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape, dtype, standard_jax):
    x, w = operands(*shape, dtype)
    run = {form: jax.jit(converted(both_passes, form)) for form in FORMS}
    tolerance = TOLERANCES[dtype]
    for sizes in sizes_of(*shape[:2]):
        sizes = jnp.asarray(sizes, jnp.int32)
        wanted = both_passes(x, w, sizes)
        for form in FORMS:
            for a, b in zip(run[form](x, w, sizes), wanted, strict=True):
                assert a.dtype == b.dtype
                a, b = (np.asarray(v, np.float32) for v in (a, b))
                most = np.abs(b).max() + 1
                np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * most)


def test_what_is_not_a_number_stays_in_its_row(standard_jax):
    x, w = operands(16, 4, 4, 8, jnp.float32)
    sizes = jnp.full(4, 4, jnp.int32)
    x = x.at[5].set(jnp.nan)  # of the second group
    y, dx, dw = converted(both_passes, RowBlocks(3, 2))(x, w, sizes)
    broken = [np.flatnonzero(np.isnan(a).any(axis)) for a, axis in ((y, 1), (dx, 1))]
    assert all(rows.tolist() == [5] for rows in broken)
    assert np.flatnonzero(np.isnan(dw).any((1, 2))).tolist() == [1]


@pytest.mark.parametrize("checked", [True, False])
def test_inside_of_a_shard_map(checked, standard_jax):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("data",), auto)
    x, w = operands(64, 4, 8, 16, jnp.float32)
    sizes = jnp.asarray([[5, 3, 0, 8], [16, 0, 0, 0], [1, 1, 1, 1], [0, 0, 9, 7]])
    spread = {"mesh": mesh, "in_specs": (P("data"), P(), P("data"))}
    spread |= {"check_vma": checked, "out_specs": (P("data"), P("data"), P("data"))}

    def on(passes):
        def one(x, w, sizes):
            w = lax.pcast(w, "data", to="varying") if checked else w
            return tuple(passes(x, w, sizes[0]))

        return jax.jit(jax.shard_map(one, **spread))(x, w, sizes)

    got, wanted = on(converted(both_passes, RowBlocks(4, 3))), on(both_passes)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_how_many_blocks_there_are_at_most():
    """As many as full blocks, and one more a group; in whole iterations."""
    assert RowBlocks(8, 1).count(64, 4) == 12
    assert RowBlocks(8, 5).count(64, 4) == 15
    assert RowBlocks(100, 1).count(64, 4) == 4


def test_of_what_there_is_no_other_form():
    """A batch of such products, those of integers, and other products."""
    like = lambda *shape: SDS(shape, jnp.float32)
    sizes = SDS((4,), jnp.int32)

    def shape_of(fn, *args):
        (eqn,) = jax.make_jaxpr(fn)(*args).eqns
        return ragged_shape(eqn)

    numbers = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), [0], [])
    batch = lambda x, w, n: lax.ragged_dot_general(x, w, n, numbers)
    assert shape_of(batch, like(8, 3, 6), like(8, 6, 5), sizes) is None
    whole = [SDS(shape, jnp.int32) for shape in ((8, 6), (4, 6, 5))]
    assert shape_of(lax.ragged_dot, *whole, sizes) is None
    assert shape_of(jnp.dot, like(8, 6), like(6, 5)) is None
    assert shape_of(lax.ragged_dot, like(8, 6), like(4, 6, 5), sizes) is not None
