"""Packed codes: every shape and width comes back, in bits/8 byte an element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem.ops.codes.packing import pack_codes, packed_codes_nbytes, unpack_codes
from tests.sets import some_fast

SHAPES = [(), (7,), (4, 0), (3, 5, 13), (197, 24)]
BITS = range(1, 9)


def _codes(shape, bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, shape, np.uint8)
    return jnp.asarray(codes)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_round_trip(shape, bits):
    codes = _codes(shape, bits)
    packed = jax.jit(pack_codes, static_argnums=1)(codes, bits)
    assert packed.dtype == jnp.uint8
    assert packed.size == packed_codes_nbytes(shape, bits)
    unpack = jax.jit(unpack_codes, static_argnums=(1, 2))
    np.testing.assert_array_equal(unpack(packed, bits, shape), codes)


@pytest.mark.parametrize("bits", [3, 8])
def test_round_trip_under_vmap_in_scan(bits):
    codes = _codes((4, 2, 24, 5), bits)

    def body(carry, c):
        packed = jax.vmap(lambda c: pack_codes(c, bits))(c)
        unpack = lambda p: unpack_codes(p, bits, c.shape[1:])
        return carry, jax.vmap(unpack)(packed)

    np.testing.assert_array_equal(jax.lax.scan(body, None, codes)[1], codes)


@pytest.mark.parametrize("bits", BITS)
def test_large_shapes_take_their_bits(bits):
    assert packed_codes_nbytes((4096, 512), bits) == 4096 * 512 * bits // 8
    rows = 197 if bits == 8 else 200  # masks are packed in whole bytes
    assert packed_codes_nbytes((8, 197, 512), bits) == 8 * rows * 512 * bits // 8


@pytest.mark.parametrize(
    "spec", some_fast([("x", None), (None, "x")], ("x", None)), ids=str
)
def test_sharded_codes_pack_without_communication(spec):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    codes = jax.device_put(_codes((64, 16), 3), sharding)
    there_and_back = jax.jit(
        lambda c: unpack_codes(pack_codes(c, 3), 3, c.shape), out_shardings=sharding
    )
    text = there_and_back.lower(codes).compile().as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text
    np.testing.assert_array_equal(there_and_back(codes), codes)
