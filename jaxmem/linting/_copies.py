"""Wide copies of narrow arrays, kept for the backward pass."""

from collections.abc import Iterator

import jax.numpy as jnp

from jaxmem.ir.scans import is_var
from jaxmem.linting._kept import Kept, kept, origin
from jaxmem.linting._subject import Finding, Level, Subject, array


def wide_copies(subject: Subject) -> Iterator[Finding]:
    """A float32 copy of a bfloat16 value: what it says is in the narrow one.

    If that is kept as well, or is there anyway (an argument, a weight), the copy costs
    all its bytes, else what it takes more than the narrow one would.
    """
    level = Level.of(subject.live)
    values = list(kept(level))
    narrow = {k.made.key for k in values}
    for value in values:
        source = _cast_from(value)
        if source is None or value.made.is_own:
            continue
        wide, thin = value.made.var.aval, source.aval
        made = origin(value.made.level, source)
        given = made.eqn is None and made.var not in made.level.carry
        free = given or (*value.made.calls, *made.key) in narrow
        share = 1 if free else 1 - thin.dtype.itemsize / wide.dtype.itemsize
        yield Finding(
            check="wide copy",
            severity="warning",
            what=f"{array(wide)} is kept for the backward pass, a copy of {thin.dtype}",
            bytes=int(share * value.bytes),
            remedy=(
                "cast again in the backward pass: jaxmem.substitute for a layer that "
                "it knows, jaxmem.schedule for scanned layers, jax.checkpoint else"
            ),
            **value.made.place(),
        )


def _cast_from(value: Kept):
    """The narrower float that a kept value is a cast of, or None."""
    eqn = value.made.eqn
    if eqn is not None and eqn.primitive.name == "mul":  # twice it, as of a square
        scaled = [v for v in eqn.invars if is_var(v)]
        eqn = value.made.level.makers.get(scaled[0]) if len(scaled) == 1 else None
    if eqn is None or eqn.primitive.name != "convert_element_type":
        return None
    source = eqn.invars[0]
    types = source.aval.dtype, value.made.var.aval.dtype
    if not is_var(source) or not all(jnp.issubdtype(t, jnp.floating) for t in types):
        return None
    return source if types[0].itemsize < types[1].itemsize else None
