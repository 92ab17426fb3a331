"""Random masks that are kept for the backward pass although a key would do."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxmem.ir import jaxprs
from jaxmem.ir.scans import is_var
from jaxmem.linting._kept import Definition, kept_values
from jaxmem.linting._subject import Finding, Subject, SubjectLevel, array

_RANDOM = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}


def dropout_mask(subject: Subject) -> Iterator[Finding]:
    """Finds kept values that depend on random bits and on no data."""
    for value in kept_values(SubjectLevel.of(subject.live)):
        mask = value.definition
        if mask.eqn is not None and not mask.is_own and _is_random(mask):
            yield Finding(
                check="dropout mask",
                severity="warning",
                what=f"{array(mask.var.aval)} of random bits is kept for the "
                "backward pass",
                bytes=value.bytes,
                remedy=(
                    "keep the key and recompute the bits: jaxmem.substitute, "
                    "jaxmem.nn.linen.Dropout or jaxmem.ops.dropout"
                ),
                **mask.place(),
            )


def _is_random(mask: Definition) -> bool:
    """Whether it depends on a key alone: the sign of data, as of relu, does not."""
    makers, todo, seen, random = mask.level.makers, [mask.var], set(), False
    while todo:
        var = todo.pop()
        if var in seen:
            continue
        seen.add(var)
        eqn = makers.get(var)
        if eqn is None:
            if not _is_key_like(var.aval):
                return False
            continue
        inner = (e for body in jaxprs.bodies(eqn) for e in jaxprs.walk(body))
        random |= any(e.primitive.name in _RANDOM for e in (eqn, *inner))
        todo += filter(is_var, eqn.invars)
    return random


def _is_key_like(aval) -> bool:
    """Integers, keys, and single numbers such as a rate."""
    key = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)
    return key or aval.size == 1 or jnp.issubdtype(aval.dtype, jnp.integer)
