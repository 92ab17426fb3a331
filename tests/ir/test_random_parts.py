"""The places of elements in arrays that are too large to be there."""

import jax.numpy as jnp
import numpy as np
import pytest

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
