"""Flops that are read from a compiled module, against those of the equations."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.cost.equations import flops
from jaxmem.memory.buffers import parse_hlo
from jaxmem.memory.time.products import products_of
from tests.memory.time import modules

S = jax.ShapeDtypeStruct


def read(fn, *args):
    """Flops by the text of the module that XLA:CPU has compiled."""
    hlo = modules.compiled(fn, *args)
    made = (i for name in hlo.computations for i in hlo.body(name))
    plain = (i for i in made if i.opcode in ("dot", "convolution"))
    return sum(p.flops for i in plain for p in products_of(hlo, i))


def expected(fn, *args):
    return sum(map(flops, jax.make_jaxpr(fn)(*args).eqns))


PRODUCTS = {
    "matrix": ((3, 5), (5, 7), (((1,), (0,)), ((), ()))),
    "transposed": ((5, 3), (7, 5), (((0,), (1,)), ((), ()))),
    "batched": ((4, 3, 5), (4, 5, 7), (((2,), (1,)), ((0,), (0,)))),
    "two axes": ((4, 3, 5), (3, 5, 7), (((1, 2), (0, 1)), ((), ()))),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_dot(name):
    lhs, rhs, axes = PRODUCTS[name]
    product = lambda a, b: jax.lax.dot_general(a, b, axes)
    args = S(lhs, jnp.float32), S(rhs, jnp.float32)
    assert read(product, *args) == expected(product, *args) > 0


@pytest.mark.parametrize("strides, padding", [((1, 1), "SAME"), ((2, 3), "VALID")])
def test_a_convolution_counts_the_taps_inside_of_the_input(strides, padding):
    def convolved(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, strides, padding, dimension_numbers=numbers
        )

    x, kernel = np.ones((2, 9, 8, 3), np.float32), np.ones((3, 3, 3, 5), np.float32)
    # with ones each output is the number of its taps inside, times the features
    taps = np.asarray(convolved(x, kernel)).sum()
    assert read(convolved, x, kernel) == pytest.approx(2 * taps, rel=1e-6)


def test_a_batch_that_a_tpu_writes_as_a_spatial_axis():
    # [16, 16, 256, 64] by [16, 16, 64, 256]: the window meets one element a position
    line = (
        "%c = bf16[16,16,256,256]{3,2,1,0} convolution(%q, %k), "
        "window={size=16x16 stride=15x15 lhs_dilate=16x16}, dim_labels=0b1f_0o1i->01bf"
    )
    q = "%q = bf16[16,256,16,64]{3,2,1,0} parameter(0)"
    k = "%k = bf16[16,256,16,64]{3,2,1,0} parameter(1)"
    hlo = parse_hlo(modules.text("\n".join([q, k, f"ROOT {line}"])))
    (product,) = products_of(hlo, hlo.instruction("c"))
    sizes = product.batch, product.m, product.n, product.k
    assert sizes == (256, 256, 256, 64)


def test_an_axis_of_the_second_operand_alone_counts_as_columns():
    line = (
        "%c = bf16[16,256,16,64]{3,2,1,0} convolution(%x, %w), "
        "window={size=1x16 pad=0_0x15_15 rhs_reversal=0x1}, "
        "dim_labels=0bf1_i1o0->0b1f"
    )
    x = "%x = bf16[16,256,1024,1]{3,2,1,0} parameter(0)"
    w = "%w = bf16[1024,16,64,1]{3,2,1,0} parameter(1)"
    hlo = parse_hlo(modules.text("\n".join([x, w, f"ROOT {line}"])))
    (product,) = products_of(hlo, hlo.instruction("c"))
    sizes = product.batch, product.m, product.n, product.k
    assert sizes == (1, 16 * 256, 16 * 64, 1024)


@pytest.mark.parametrize("dtype, bits", [("bf16", 16), ("f32", 32), ("f8e4m3fn", 8)])
def test_the_wider_operand_tells_the_rate(dtype, bits):
    lines = (
        f"%a = {dtype}[4,8]{{1,0}} parameter(0)",
        f"%b = {dtype}[8,2]{{1,0}} parameter(1)",
        "ROOT %c = f32[4,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={0}",
    )
    hlo = parse_hlo(modules.text("\n".join(lines)))
    (product,) = products_of(hlo, hlo.instruction("c"))
    assert (product.bits, product.flops) == (bits, 2 * 4 * 8 * 2)


def test_the_taps_of_an_axis_are_those_of_its_definition():
    from jaxmem.memory.time.products import _taps

    cases = itertools.product((1, 4, 5), (1, 3), (1, 2), (0, 1), (1, 2), (1, 2))
    for base, size, stride, low, dilated, spread in cases:
        outs = 4
        met = 0
        for o, t in itertools.product(range(outs), range(size)):
            at = o * stride - low + t * spread
            met += at >= 0 and at % dilated == 0 and at // dilated < base
        window = (stride, low, dilated, spread)
        assert _taps(base, size, outs, window) == met / outs


def test_a_convolution_without_spatial_axes_is_a_matrix_product():
    lines = (
        "%a = bf16[512,256]{1,0} parameter(0)",
        "%b = bf16[256,128]{1,0} parameter(1)",
        "ROOT %c = bf16[512,128]{1,0} convolution(%a, %b), dim_labels=bf_io->bf",
    )
    hlo = parse_hlo(modules.text("\n".join(lines)))
    (product,) = products_of(hlo, hlo.instruction("c"))
    assert (product.m, product.n, product.k) == (512, 128, 256)
