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


@pytest.mark.parametrize("rows", [96, 100, 700])
def test_rows_on_the_host_are_not_mixed_with_what_is_there(rows):
    """Fewer rows than a chunk go alone, of arrays of any length."""
    host = jax.memory.Space.Host
    x = jnp.arange(rows * 3, dtype=jnp.float32).reshape(rows, 3)

    def rule(lead, carried, read):
        del lead
        on_device = jax.device_put(carried, jax.memory.Space.Device)
        return jax.device_put(on_device + read, host)

    @jax.jit
    def run(x):
        new = by_rows(rule, Chunks(1, 32), jax.device_put(x, host), 2 * x)
        return jax.device_put(new, jax.memory.Space.Device)

    np.testing.assert_array_equal(run(x), 3 * x)
