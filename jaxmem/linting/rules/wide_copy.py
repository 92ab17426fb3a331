"""float32 copies of narrower values, kept for the backward pass."""

from collections.abc import Iterator

import jax.numpy as jnp

from jaxmem.ir.scans import is_var
from jaxmem.linting._kept import Definition, definition_of, kept_values
from jaxmem.linting._subject import Finding, Subject, SubjectLevel, array


def wide_copy(subject: Subject) -> Iterator[Finding]:
    """Finds kept float32 copies of bfloat16 values, which have the same information."""
    # Where the narrow value is in memory anyway (it is kept as well, or is an argument
    # or a weight) the copy costs all its bytes, else the difference of the two.
    level = SubjectLevel.of(subject.live)
    values = list(kept_values(level))
    kept_keys = {value.definition.key for value in values}
    for value in values:
        copy = value.definition
        source = _cast_from(copy)
        if source is None or copy.is_own:
            continue
        wide, narrow = copy.var.aval, source.aval
        what = f"{array(wide)} is kept for the backward pass, a copy of {narrow.dtype}"
        original = definition_of(copy.level, source)
        is_input = original.eqn is None and original.var not in original.level.carry
        in_memory = is_input or (*copy.calls, *original.key) in kept_keys
        share = 1 if in_memory else 1 - narrow.dtype.itemsize / wide.dtype.itemsize
        yield Finding(
            check="wide copy",
            severity="warning",
            what=what,
            bytes=int(share * value.bytes),
            remedy=(
                "recompute the cast in the backward pass: jaxmem.substitute for layers "
                "that it knows, jaxmem.schedule for scanned layers, else jax.checkpoint"
            ),
            **copy.place(),
        )


def _cast_from(copy: Definition):
    """The narrower float that a value is a cast of, or None."""
    eqn = copy.eqn
    if eqn is not None and eqn.primitive.name == "mul":  # by 2, as kept for a square
        scaled = [v for v in eqn.invars if is_var(v)]
        eqn = copy.level.makers.get(scaled[0]) if len(scaled) == 1 else None
    if eqn is None or eqn.primitive.name != "convert_element_type":
        return None
    source = eqn.invars[0]
    types = source.aval.dtype, copy.var.aval.dtype
    if not is_var(source) or not all(jnp.issubdtype(t, jnp.floating) for t in types):
        return None
    return source if types[0].itemsize < types[1].itemsize else None
