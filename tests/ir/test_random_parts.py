"""The places of elements in arrays that are too large to be there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.ir.placements import REPLICATE, Placements, Shard
from jaxmem.ir.placements.lower import on_part
from jaxmem.ir.random_parts import places

# Places that fill one word, and places beyond it; strides beyond a word.
WHOLE = [(2**16, 2**16), (3, 70_000, 70_000), (5, 2**31 - 1, 2, 3), (6, 2**31, 70_001)]


@pytest.mark.parametrize("whole", WHOLE, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_places_of_64_bits(whole, axis):
    shape = [min(size, 3) for size in whole]
    start = whole[axis] - shape[axis]
    high, low = places((2, *shape), whole, axis + 1, jnp.uint32(start))
    index = np.indices(shape).astype(object)
    index[axis] += start
    for d, size in enumerate(whole[1:], 1):
        index[0] = index[0] * size + index[d]
    found = np.asarray(high).astype(object) * 2**32 + np.asarray(low).astype(object)
    for of_key in found:  # each key counts from 0
        assert (of_key == index[0]).all()


def test_a_part_of_several_places():
    key, shape = jax.random.key(4), (3, 8)
    (eqn,) = jax.make_jaxpr(lambda key: jax.random.bits(key, shape))(key).eqns
    at = jnp.array([0, 1, 4, 5])  # of two shards
    first = lambda size: at - jnp.arange(4)
    placed = Placements((REPLICATE,), (Shard(1),))
    (part,) = on_part(eqn, [key], placed, lambda size: 4, first)
    assert (part == jax.random.bits(key, shape)[:, at]).all()
