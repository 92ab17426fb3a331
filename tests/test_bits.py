"""Packed booleans: every shape comes back, in about an eighth of the bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem._bits import pack_bits, packed_nbytes, unpack_bits
from tests.arrays import array

SHAPES = [(), (1,), (7,), (8,), (17,), (0,), (4, 0), (3, 5, 13), (16, 3), (197, 24)]


def _mask(shape):
    return array(np.random.default_rng(0).random(shape) < 0.5)


@pytest.mark.fast("()", "(8,)", "(17,)", "(4, 0)", "(3, 5, 13)", "(197, 24)")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip(shape):
    mask = _mask(shape)
    packed = pack_bits(mask)
    assert packed.dtype == jnp.uint8
    assert packed.size == packed_nbytes(shape)
    np.testing.assert_array_equal(unpack_bits(packed, shape), mask)


def test_round_trip_under_vmap_in_scan():
    masks = _mask((4, 2, 24, 5))

    def body(carry, mask):
        packed = jax.vmap(pack_bits)(mask)
        return carry, jax.vmap(lambda p: unpack_bits(p, mask.shape[1:]))(packed)

    np.testing.assert_array_equal(jax.lax.scan(body, None, masks)[1], masks)


def test_large_shapes_take_an_eighth():
    assert packed_nbytes((4096, 4096)) == 4096 * 4096 // 8
    assert packed_nbytes((8, 197, 1024)) == 8 * 200 * 1024 // 8


@pytest.mark.parametrize("spec", [("x", None), (None, "x")], ids=str)
def test_sharded_masks_pack_without_communication(spec):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    mask = jax.device_put(_mask((64, 16)), sharding)
    there_and_back = jax.jit(
        lambda m: unpack_bits(pack_bits(m), m.shape), out_shardings=sharding
    )
    text = there_and_back.lower(mask).compile().as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text
    np.testing.assert_array_equal(there_and_back(mask), mask)
