"""Bytes of what parts are added to, in float32 where the array is narrower."""

import jax.numpy as jnp

from jaxmem.ir.jaxprs import elements
from jaxmem.ir.shards import Spreads


def wide(dtype):
    """The type in which parts of a sum are added."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype("float32") if narrow else dtype


def summed_size(v) -> int:
    """Bytes of a variable while parts are added to it, on all devices together."""
    return elements(v.aval.shape) * wide(v.aval.dtype).itemsize


def sum_bytes(eqn, v, spreads: Spreads) -> float:
    """Bytes on one device of what the parts of an equation are added to."""
    # a product's sum is whole until it is scattered over the devices it is summed over
    partial = spreads.partial_bytes(eqn) / max(1, spreads.bytes_of(v))
    return summed_size(v) / spreads.shards(v) * max(1, partial)
