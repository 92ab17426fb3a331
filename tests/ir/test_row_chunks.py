"""A leaf's rows in chunks: each is treated once, wherever the last chunk starts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.ir.row_chunks import Chunks, by_rows


@pytest.mark.parametrize(
    ("rows", "chunks"),
    [
        (96, Chunks(1, 32)),
        (100, Chunks(1, 32)),
        (33, Chunks(1, 32)),
        (104, Chunks(2, 32)),
        (32, Chunks(1, 32)),
    ],
)
def test_every_row_once(rows, chunks):
    """Of a rule that adds: a row that came twice would show."""
    x = jnp.arange(rows * 3, dtype=jnp.float32).reshape(rows, 3)
    codes = jnp.arange(rows, dtype=jnp.uint8)

    def rule(lead, carried, read):
        x, codes = carried
        return x + read, codes + lead.astype(jnp.uint8)

    run = jax.jit(lambda carried, read: by_rows(rule, chunks, carried, read))
    new, numbered = run((x, codes), 2 * x)
    np.testing.assert_array_equal(new, 3 * x)
    number = jnp.arange(rows, dtype=jnp.uint8)
    np.testing.assert_array_equal(numbered, codes + number)
