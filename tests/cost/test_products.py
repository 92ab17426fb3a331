"""Products of a jaxpr: rows, columns and sums of one device, and of one part."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.chips import rates_of
from jaxmem.cost import equations, roofline
from jaxmem.cost.kernel import Product
from jaxmem.cost.products import product_of
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.shards import of_shardings

SDS = jax.ShapeDtypeStruct
TARGET = rates_of("h100")


def like(*shape, dtype="bfloat16"):
    return SDS(shape, dtype)


def equation(fn, *args):
    (eqn,) = jax.make_jaxpr(fn)(*args).eqns
    return eqn


def wanted(batch, m, n, k, dtype="bfloat16"):
    """In the order of the words "batch, rows, columns, sum"."""
    bits = 8 * jnp.dtype(dtype).itemsize
    return Product(batch, m, n, k, bits, dtype, library=True)


def dot(contract, batch=((), ())):
    return lambda x, y: lax.dot_general(x, y, (contract, batch))


def conv(groups=1, strides=(1, 1), of_images=1, dilated=(1, 1), padding="SAME"):
    return lambda x, w: lax.conv_general_dilated(
        *(x, w, strides, padding),
        lhs_dilation=dilated,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
        batch_group_count=of_images,
    )


IMAGES = like(2, 8, 10, 12)  # two of 8 by 10 positions with 12 features
PRODUCTS = {
    "dot": (dot(((1,), (0,))), (like(3, 5), like(5, 7)), (1, 3, 7, 5)),
    "transposed": (dot(((0,), (1,))), (like(5, 3), like(7, 5)), (1, 3, 7, 5)),
    "a vector": (dot(((1,), (0,))), (like(3, 5), like(5)), (1, 3, 1, 5)),
    "an outer product": (dot(((), ())), (like(3), like(5)), (1, 3, 5, 1)),
    "of several axes": (
        dot(((1, 2), (2, 0))),
        (like(3, 5, 7, 2), like(7, 11, 5)),
        (1, 3 * 2, 11, 5 * 7),
    ),
    "of a batch": (
        dot(((1,), (3,)), ((0, 3), (1, 0))),
        (like(2, 5, 3, 4), like(4, 2, 7, 5)),
        (2 * 4, 3, 7, 5),
    ),
    "convolution": (
        conv(),
        (IMAGES, like(3, 5, 12, 6)),
        (1, 2 * 8 * 10, 6, 3 * 5 * 12),
    ),
    "with strides": (
        conv(strides=(2, 5)),
        (IMAGES, like(3, 5, 12, 6)),
        (1, 2 * 4 * 2, 6, 3 * 5 * 12),
    ),
    # as the gradient of one with strides: zeros count like elements
    "of an image with zeros between": (
        conv(dilated=(2, 2), padding=((0, 0), (0, 0))),
        (IMAGES, like(1, 1, 12, 6)),
        (1, 2 * 15 * 19, 6, 12),
    ),
    "with groups": (
        conv(groups=4),
        (IMAGES, like(3, 5, 3, 8)),
        (1, 2 * 8 * 10, 8, 3 * 5 * 3),
    ),
    "a feature by itself": (
        conv(groups=12),
        (IMAGES, like(3, 5, 1, 12)),
        (1, 2 * 8 * 10, 12, 3 * 5),
    ),
    # as the gradient of the kernel of one with groups
    "with groups of images": (
        conv(of_images=2),
        (IMAGES, like(3, 5, 12, 6)),
        (1, 8 * 10, 6, 3 * 5 * 12),
    ),
    "rows of groups": (
        lax.ragged_dot,
        (like(32, 64), like(5, 64, 16), SDS((5,), jnp.int32)),
        (1, 32, 16, 64),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_rows_columns_and_the_sum(name):
    fn, args, sizes = PRODUCTS[name]
    eqn = equation(fn, *args)
    assert product_of(eqn) == wanted(*sizes)
    assert product_of(eqn).flops == equations.flops(eqn)


def ragged(summed, batched, rows, groups):
    numbers = lax.RaggedDotDimensionNumbers((summed, batched), [rows], groups)
    return lambda x, y, n: lax.ragged_dot_general(x, y, n, numbers)


def test_groups_of_what_is_summed_are_products_of_their_own():
    """As the gradient of the groups' matrices: each is a sum over its rows."""
    fn = ragged(((0,), (0,)), ((), ()), 0, [])
    eqn = equation(fn, like(60, 64), like(60, 16), SDS((5,), jnp.int32))
    assert eqn.outvars[0].aval.shape == (5, 64, 16)
    assert product_of(eqn) == wanted(5, 64, 16, 60 // 5)
    assert product_of(eqn).flops == equations.flops(eqn)


def test_groups_of_a_batch_are_that_batch():
    fn = ragged(((2,), (1,)), ((0,), (0,)), 0, [])
    eqn = equation(fn, like(6, 32, 64), like(6, 64, 16), SDS((3,), jnp.int32))
    assert product_of(eqn) == wanted(6, 32, 16, 64)


@pytest.mark.parametrize("wide", [0, 1])
def test_its_type_is_that_of_the_wider_operand(wide):
    types = ["bfloat16", "bfloat16"]
    types[wide] = "float32"
    fn = lambda x, y: lax.dot_general(
        x, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    eqn = equation(fn, like(3, 5, dtype=types[0]), like(5, 7, dtype=types[1]))
    assert product_of(eqn) == wanted(1, 3, 7, 5, "float32")


# -- of one device


@pytest.fixture(scope="module")
def mesh():
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((4, 2), ("data", "model"), auto)


ROWS = dot(((1,), (0,)))
EXPERTS = like(32, 64), like(4, 64, 16), SDS((4,), jnp.int32)
DATA, MODEL, BOTH = ("data",), ("model",), ("data", "model")
# an equation, how its operands are sharded, and what a device does of it
SHARDED = {
    "rows": (ROWS, (like(32, 64), like(64, 16)), [DATA, ()], (1, 8, 16, 64)),
    "rows over both axes": (
        *(ROWS, (like(32, 64), like(64, 16)), [(BOTH,), ()]),
        (1, 4, 16, 64),
    ),
    "columns": (
        *(ROWS, (like(32, 64), like(64, 16)), [(), (None, "model")]),
        (1, 32, 8, 64),
    ),
    "rows and columns": (
        *(ROWS, (like(32, 64), like(64, 16)), [DATA, (None, "model")]),
        (1, 8, 8, 64),
    ),
    "a sum": (
        *(ROWS, (like(32, 64), like(64, 16)), [(None, "model"), MODEL]),
        (1, 32, 16, 32),
    ),
    # the gradient of a weight, of examples that are sharded: narrow ones keep their
    # few rows, of a shorter sum
    "a sum over examples": (
        *(dot(((0,), (0,))), (like(512, 8), like(512, 16)), [DATA, DATA]),
        (1, 8, 16, 128),
    ),
    "weights that are gathered": (
        *(ROWS, (like(32, 64), like(64, 16)), [DATA, (("data", "model"),)]),
        (1, 8, 16, 32),
    ),
    "a batch, and then rows": (
        *(dot(((2,), (1,)), ((0,), (0,))), (like(8, 32, 64), like(8, 64, 16))),
        *([("data", "model"), DATA], (2, 16, 16, 64)),
    ),
    "images": (conv(), (like(4, 8, 10, 12), like(3, 5, 12, 6)))
    + ([DATA, ()], (1, 1 * 8 * 10, 6, 3 * 5 * 12)),
    "output features": (conv(), (IMAGES, like(3, 5, 12, 6)))
    + ([(), (None, None, None, "model")], (1, 2 * 8 * 10, 3, 3 * 5 * 12)),
    "input features": (conv(), (IMAGES, like(3, 5, 12, 6)))
    + ([(None, None, None, "model"), ()], (1, 2 * 8 * 10, 6, 3 * 5 * 6)),
    "groups of features": (
        *(conv(groups=4), (IMAGES, like(3, 5, 3, 8)), [(None, None, None, "data"), ()]),
        (1, 2 * 8 * 10, 2, 3 * 5 * 3),
    ),
    # a row is done where its group's matrix is
    "experts": (lax.ragged_dot, EXPERTS, [(), DATA, ()], (1, 8, 16, 64)),
}


@pytest.mark.parametrize("name", SHARDED)
def test_one_device_has_its_share_of_each_axis(mesh, name):
    fn, args, specs, sizes = SHARDED[name]
    places = [NamedSharding(mesh, P(*spec)) for spec in specs]
    sharded = [
        SDS(x.shape, x.dtype, sharding=p) for x, p in zip(args, places, strict=True)
    ]
    closed = jax.make_jaxpr(fn)(*sharded)
    shardings = shardings_in(closed, of_shardings(closed, places))
    (eqn,) = closed.eqns
    assert product_of(eqn, shardings) == wanted(*sizes)
    # no work is counted twice, and none is lost
    assert wanted(*sizes).flops == equations.flops(eqn, shardings)


# -- of one part

PARTS = {
    "rows": (ROWS, (like(32, 64), like(64, 16)), (0, None), (1, 8, 16, 64)),
    "columns": (ROWS, (like(32, 64), like(64, 16)), (None, 1), (1, 32, 4, 64)),
    "a sum": (ROWS, (like(32, 64), like(64, 16)), (1, 0), (1, 32, 16, 16)),
    "a batch": (
        *(dot(((2,), (1,)), ((0,), (0,))), (like(8, 32, 64), like(8, 64, 16))),
        *((0, 0), (2, 32, 16, 64)),
    ),
    "rows that do not divide": (
        *(ROWS, (like(33, 64), like(64, 16)), (0, None), (1, 9, 16, 64)),
    ),
    "images": (conv(), (like(4, 8, 10, 12), like(3, 5, 12, 6)))
    + ((0, None), (1, 1 * 8 * 10, 6, 3 * 5 * 12)),
    "output features": (conv(), (IMAGES, like(3, 5, 12, 8)))
    + ((None, 3), (1, 2 * 8 * 10, 2, 3 * 5 * 12)),
    "input features": (conv(), (IMAGES, like(3, 5, 12, 8)))
    + ((3, 2), (1, 2 * 8 * 10, 8, 3 * 5 * 3)),
    "groups of features": (conv(groups=4), (IMAGES, like(3, 5, 3, 8)))
    + ((3, 3), (1, 2 * 8 * 10, 2, 3 * 5 * 3)),
    "groups of images": (conv(of_images=4), (like(4, 8, 10, 12), like(3, 5, 12, 8)))
    + ((0, 3), (1, 8 * 10, 2, 3 * 5 * 12)),
    "rows of groups": (lax.ragged_dot, EXPERTS) + ((0, None, None), (1, 8, 16, 64)),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_has_its_share_of_the_axis_that_is_cut(name):
    fn, args, axes, sizes = PARTS[name]
    eqn = equation(fn, *args)
    assert product_of(eqn, axes=axes, n=4) == wanted(*sizes)
    whole = (None,) * len(axes)
    assert product_of(eqn, axes=whole, n=4) == product_of(eqn)
    took = roofline.product_seconds(wanted(*sizes), TARGET)
    assert equations.arithmetic(eqn, TARGET, axes=axes, n=4) == took


def test_a_part_of_what_one_device_has(mesh):
    specs = P("data"), P(None, "model")
    places = [NamedSharding(mesh, spec) for spec in specs]
    closed = jax.make_jaxpr(ROWS)(like(64, 64), like(64, 16))
    shardings = shardings_in(closed, of_shardings(closed, places))
    part = product_of(closed.eqns[0], shardings, (0, None), 2)
    assert part == wanted(1, 64 // 4 // 2, 16 // 2, 64)


# -- what follows for the price


def per_flop(m, n, k):
    eqn = equation(ROWS, like(m, k), like(k, n))
    return equations.product_seconds(eqn, TARGET) / equations.flops(eqn)


def test_a_last_wave_that_is_nearly_empty_is_dear():
    """A row of tiles more than one for each processor takes another wave of them."""
    columns, k = 256, 2**14
    rows = lambda tiles: 128 * tiles
    full = per_flop(rows(TARGET.processors), columns, k)
    assert per_flop(rows(TARGET.processors + 1), columns, k) > 1.05 * full
    # waves that are full are as cheap as one
    assert per_flop(rows(3 * TARGET.processors), columns, k) == pytest.approx(full)


def test_narrow_products_are_dearer_than_a_wide_one_of_their_flops():
    """Queries and keys by themselves, against both in one product."""
    rows, width = 1024, 768
    narrow = equation(ROWS, like(rows, width), like(width, width))
    wide = equation(ROWS, like(rows, width), like(width, 2 * width))
    assert equations.flops(wide) == 2 * equations.flops(narrow)
    one, two = (equations.product_seconds(e, TARGET) for e in (wide, narrow))
    assert 2 * two > 1.1 * one
    # and each is started
    more = 2 * equations.seconds(narrow, TARGET) - equations.seconds(wide, TARGET)
    start = TARGET.launch + TARGET.fill
    assert more == pytest.approx(2 * two - one + start, rel=1e-9)
