"""Random masks, kept for the backward pass where a key would do."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxmem import _jaxpr
from jaxmem.ir.scans import is_var
from jaxmem.linting._kept import Made, kept
from jaxmem.linting._subject import Finding, Level, Subject, array

_RANDOM = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}


def dropout_masks(subject: Subject) -> Iterator[Finding]:
    """A kept value made of random bits and of no data."""
    for value in kept(Level.of(subject.live)):
        made = value.made
        if made.eqn is not None and not made.is_own and _is_random(made):
            yield Finding(
                check="dropout mask",
                severity="warning",
                what=f"{array(made.var.aval)} of random bits is kept for the "
                "backward pass",
                bytes=value.bytes,
                remedy=(
                    "keep the key and make the bits again: jaxmem.substitute, "
                    "jaxmem.nn.linen.Dropout or jaxmem.ops.dropout"
                ),
                **made.place(),
            )


def _is_random(made: Made) -> bool:
    """Whether it comes from a key alone: a sign of data, as of relu, does not."""
    by, todo, seen, random = made.level.makers, [made.var], set(), False
    while todo:
        var = todo.pop()
        if var in seen:
            continue
        seen.add(var)
        eqn = by.get(var)
        if eqn is None:
            if not _is_key_like(var.aval):
                return False
            continue
        inner = (e for body in _jaxpr.bodies(eqn) for e in _jaxpr.walk(body))
        random |= any(e.primitive.name in _RANDOM for e in (eqn, *inner))
        todo += filter(is_var, eqn.invars)
    return random


def _is_key_like(aval) -> bool:
    """Integers, keys, and single numbers such as a rate."""
    key = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)
    return key or aval.size == 1 or jnp.issubdtype(aval.dtype, jnp.integer)
