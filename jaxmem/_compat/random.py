"""JAX's default generator, by its counters."""

from typing import Any


def is_threefry(aval) -> bool:
    """Whether keys of this type are those of JAX's default generator."""
    from jax.extend import random

    return aval.dtype._impl is random.threefry_prng_impl


def is_partitionable(eqn) -> bool:
    """Whether `eqn` was traced with `jax_threefry_partitionable`."""
    return eqn.ctx.threefry_partitionable


def threefry2x32(key1, key2, high, low) -> list[Any]:
    """Two random words of each counter, whose words are `high` and `low`."""
    from jax.extend import random

    return random.threefry2x32_p.bind(key1, key2, high, low)
